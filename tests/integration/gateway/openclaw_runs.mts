/** Plays OpenClaw for the plugin against a gateway: three runs of one session, then its end. Arguments: base URL, key. */

import plugin, { type HookContext, type HookEvent, type PluginApi } from "../../../extensions/rl-training-headers/index.ts";

const [baseUrl, key] = process.argv.slice(2);
const hooks = new Map<string, (event: HookEvent, context: HookContext) => unknown>();
const api: PluginApi = {
  pluginConfig: { baseUrl: baseUrl! },
  logger: { info: () => undefined, warn: (text) => console.error(text) },
  on: (hook, handler) => void hooks.set(hook, handler),
};
plugin.register(api);

async function run(runId: string, trigger: string, prompt: string, own: Record<string, string> = {}): Promise<void> {
  const context = { runId, sessionId: "agent:main/größe", trigger };
  await hooks.get("before_prompt_build")!({ prompt }, context);
  const answer = await fetch(`${baseUrl}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json", ...own },
    body: JSON.stringify({ model: "assistant", messages: [{ role: "user", content: prompt }] }),
  });
  if (!answer.ok) {
    throw new Error(`${answer.status}: ${await answer.text()}`);
  }
  await hooks.get("agent_end")!({}, context);
}

await run("1", "user", "Hello");
await run("2", "heartbeat", "Anything to do?");
await run("3", "user", "Of its own", { "X-Session-Id": "own", "X-Turn-Type": "side" });
await hooks.get("before_reset")!({}, { sessionId: "agent:main/größe" });
await run("4", "memory", "Remember this");
await hooks.get("session_end")!({ sessionId: "agent:main/größe" }, {});
