/**
 * Tells a Tentalis gateway which session a request belongs to, whether its turn can be trained on, and when the
 * session is over. The hooks learn it from OpenClaw; a wrapped fetch writes it into the requests to the gateway.
 */

import { readConfig } from "./src/config.ts";
import { type Fetch, type Keys, headerValue, withHeaders } from "./src/fetch.ts";
import { Runs } from "./src/runs.ts";

/** The part of OpenClaw's hook context that is read here. */
export interface HookContext {
  readonly runId?: string;
  readonly sessionId?: string;
  readonly sessionKey?: string;
  readonly trigger?: string;
}

export interface HookEvent {
  readonly prompt?: string;
  readonly sessionId?: string;
}

/** The part of OpenClaw's plugin API that is used here. */
export interface PluginApi {
  readonly pluginConfig?: Record<string, unknown>;
  readonly logger: { info(text: string): void; warn(text: string): void };
  on(hook: string, handler: (event: HookEvent, context: HookContext) => unknown): void;
}

function sessionOf(event: HookEvent, context: HookContext): string | undefined {
  // The key outlives the session: after a reset it stands for the next one.
  return context.sessionId ?? event.sessionId ?? context.sessionKey;
}

const plugin = {
  id: "rl-training-headers",
  name: "RL training headers",
  description: "Tells a Tentalis gateway which session a request belongs to and whether the turn can be trained on.",

  /** Raises ConfigError: OpenClaw shows it and goes on without the plugin. */
  register(api: PluginApi): void {
    const config = readConfig(api.pluginConfig);
    const runs = new Runs();
    const keys: Keys = new Map();
    let wrapped: Fetch | undefined;
    let below: Fetch | undefined;

    api.on("before_prompt_build", (event, context) => {
      const sessionId = sessionOf(event, context);
      if (sessionId === undefined) {
        return;
      }
      runs.begin({
        sessionId,
        runId: context.runId,
        turnType: config.sideTriggers.has(context.trigger ?? "") ? "side" : "main",
        prompt: event.prompt ?? "",
      });
      // Somebody may have put a fetch of their own in place since: ours goes on top, and adds nothing twice.
      if (globalThis.fetch !== wrapped) {
        below = globalThis.fetch;
        wrapped = withHeaders(below, config, runs, keys);
        globalThis.fetch = wrapped;
      }
    });

    api.on("agent_end", (event, context) => {
      const sessionId = sessionOf(event, context);
      if (sessionId !== undefined) {
        runs.finish(sessionId, context.runId);
      }
    });

    api.on("before_reset", (event, context) => {
      const sessionId = sessionOf(event, context);
      if (sessionId !== undefined) {
        runs.end(sessionId);
      }
    });

    api.on("session_end", async (event, context) => {
      const sessionId = event.sessionId ?? sessionOf(event, context);
      if (sessionId === undefined) {
        return;
      }
      runs.end(sessionId);
      const credentials = keys.get(sessionId);
      // Without a request of its own the gateway has never heard of the session.
      if (!config.endSessions || credentials === undefined) {
        return;
      }
      keys.delete(sessionId);
      const root = config.baseUrl.href.replace(/\/+$/, "");
      const url = `${root}/sessions/${encodeURIComponent(headerValue(sessionId))}/end`;
      try {
        const answer = await (below ?? globalThis.fetch)(url, {
          method: "POST",
          headers: credentials,
          signal: AbortSignal.timeout(10_000),
        });
        if (!answer.ok) {
          api.logger.warn(`[rl-training-headers] the gateway did not end session ${sessionId}: ${answer.status}`);
        }
      } catch (error) {
        // Nothing is lost: the gateway's side ends idle sessions by itself.
        api.logger.warn(`[rl-training-headers] the gateway was not told that session ${sessionId} ended: ${error}`);
      }
    });

    api.on("gateway_stop", () => {
      if (below !== undefined && globalThis.fetch === wrapped) {
        globalThis.fetch = below;
      }
    });

    api.logger.info(`[rl-training-headers] adds headers to requests to ${config.baseUrl.href}`);
  },
};

export default plugin;
