/**
 * Tells a Tentalis gateway the session of each request, whether its turn can be trained on, and when the session ends.
 * OpenClaw's hooks provide this information; a wrapped fetch adds it to the requests to the gateway.
 */

import { readConfig } from "./src/config.ts";
import { type Fetch, type Keys, headerValue, withHeaders } from "./src/fetch.ts";
import { Runs } from "./src/runs.ts";

/** The fields of OpenClaw's hook context that the plugin reads. */
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

/** The part of OpenClaw's plugin API that the plugin uses. */
export interface PluginApi {
  readonly pluginConfig?: Record<string, unknown>;
  readonly logger: { info(text: string): void; warn(text: string): void };
  on(hook: string, handler: (event: HookEvent, context: HookContext) => unknown): void;
}

function sessionOf(event: HookEvent, context: HookContext): string | undefined {
  // The key is the last resort: it outlives the session and names the next one after a reset.
  return context.sessionId ?? event.sessionId ?? context.sessionKey;
}

const plugin = {
  id: "rl-training-headers",
  name: "RL training headers",
  description: "Tells a Tentalis gateway which session a request belongs to and whether the turn can be trained on.",

  /** Throws ConfigError; OpenClaw shows it and continues without the plugin. */
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
      // Another plugin may have replaced fetch since: wrap it again. Headers that exist are not added twice.
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
      // Without credentials the session sent no request, so the gateway does not know it.
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
        // Not an error: the gateway ends idle sessions by itself.
        api.logger.warn(`[rl-training-headers] could not tell the gateway that session ${sessionId} ended: ${error}`);
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
