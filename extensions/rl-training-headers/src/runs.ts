/** Tracks the active runs and finds the run to which a request belongs. */

export interface Run {
  readonly sessionId: string;
  readonly runId: string | undefined;
  readonly turnType: "main" | "side";
  readonly prompt: string;
}

/** Upper bound of active runs. If it is exceeded, the oldest is dropped: its end was never reported. */
const MOST = 1024;

/** Returns the text of the last user message of an OpenAI or Anthropic chat request, or "". */
export function lastUserText(body: unknown): string {
  if (typeof body !== "string") {
    return "";
  }
  let messages: unknown;
  try {
    messages = (JSON.parse(body) as { messages?: unknown } | null)?.messages;
  } catch (error) {
    if (error instanceof SyntaxError) {
      return "";
    }
    throw error;
  }
  if (!Array.isArray(messages)) {
    return "";
  }
  for (const message of messages.toReversed() as ({ role?: unknown; content?: unknown } | null)[]) {
    if (message?.role !== "user") {
      continue;
    }
    const { content } = message;
    if (typeof content === "string") {
      return content;
    }
    const parts = (Array.isArray(content) ? content : []) as ({ type?: unknown; text?: unknown } | null)[];
    const texts = parts.flatMap((part) => (part?.type === "text" && typeof part.text === "string" ? [part.text] : []));
    // Anthropic sends a tool result as a user message without text: the user's own text is in an earlier message.
    if (texts.length > 0) {
      return texts.join("\n");
    }
  }
  return "";
}

export class Runs {
  readonly #live = new Map<string, Run>();
  readonly #ended = new Set<string>();

  /** Begins a run. A session has one run at a time: a new one replaces the old one. */
  begin(run: Run): void {
    this.#live.delete(run.sessionId);
    this.#live.set(run.sessionId, run);
    if (run.turnType === "main") {
      // The user continues the session, or its key now names the next session.
      this.#ended.delete(run.sessionId);
    }
    for (const oldest of this.#live.keys()) {
      if (this.#live.size <= MOST) {
        break;
      }
      this.#live.delete(oldest);
      this.#ended.delete(oldest);
    }
  }

  /** Ends a run. The end of a run that was already replaced does not affect its successor. */
  finish(sessionId: string, runId: string | undefined): void {
    const run = this.#live.get(sessionId);
    if (run !== undefined && (runId === undefined || run.runId === undefined || run.runId === runId)) {
      this.#live.delete(sessionId);
      this.#ended.delete(sessionId);
    }
  }

  /** Marks a session as ended. Its run may still send last requests, such as a summary for the memory. */
  end(sessionId: string): void {
    this.#ended.add(sessionId);
    for (const oldest of this.#ended) {
      if (this.#ended.size <= MOST) {
        break;
      }
      this.#ended.delete(oldest);
    }
  }

  hasEnded(sessionId: string): boolean {
    return this.#ended.has(sessionId);
  }

  /**
   * Returns the run that sends a request with this body, or undefined if it is uncertain.
   *
   * A single active run is always the answer. Of several, a request belongs to the one whose prompt is in its last user
   * message. If none or more than one matches, the result is undefined: the gateway's rules are better than a guess
   * that could mix the sessions of two users.
   */
  of(body: unknown): Run | undefined {
    if (this.#live.size <= 1) {
      return this.#live.values().next().value;
    }
    const said = lastUserText(body);
    const fitting = [...this.#live.values()].filter((run) => run.prompt !== "" && said.includes(run.prompt));
    return fitting.length === 1 ? fitting[0] : undefined;
  }
}
