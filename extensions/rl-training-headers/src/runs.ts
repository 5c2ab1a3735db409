/** Which runs are under way, and to which of them a request belongs. */

export interface Run {
  readonly sessionId: string;
  readonly runId: string | undefined;
  readonly turnType: "main" | "side";
  readonly prompt: string;
}

/** More runs than this are never under way at once: the oldest is one whose end was never told. */
const MOST = 1024;

/** The text of the last user message of a chat request, in OpenAI's or Anthropic's shape; "" if there is none. */
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
    // In Anthropic's shape the result of a tool is a user message without text: what the user said lies before it.
    if (texts.length > 0) {
      return texts.join("\n");
    }
  }
  return "";
}

export class Runs {
  readonly #live = new Map<string, Run>();
  readonly #ended = new Set<string>();

  /** A session has one run at a time: a new one replaces what was there. */
  begin(run: Run): void {
    this.#live.delete(run.sessionId);
    this.#live.set(run.sessionId, run);
    if (run.turnType === "main") {
      // Somebody talks in it again, or its name stands for the next one.
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

  /** The run is over. The end of a run that was replaced already says nothing about its successor. */
  finish(sessionId: string, runId: string | undefined): void {
    const run = this.#live.get(sessionId);
    if (run !== undefined && (runId === undefined || run.runId === undefined || run.runId === runId)) {
      this.#live.delete(sessionId);
      this.#ended.delete(sessionId);
    }
  }

  /** The session is over: what its run still asks (a summary for the memory, say) is its last. */
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
   * The run that sends a request with this body, or undefined where that is not certain.
   *
   * With one run under way there is no question. With several, a request belongs to the one whose prompt is in its last
   * user message. If that fits none or more than one, nobody is named: the gateway's own rules are better than a
   * guess that would mix two people's sessions.
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
