/** A fake OpenClaw host for tests: calls hooks, collects warnings and records the requests of fetch. */

import plugin, { type HookContext, type HookEvent, type PluginApi } from "../index.ts";

export const GATEWAY = "http://gateway.test:8100/v1";
export const CHAT = `${GATEWAY}/chat/completions`;

export interface Sent {
  readonly url: string;
  readonly method: string;
  readonly headers: Headers;
  readonly body: string;
}

export class Host implements PluginApi {
  readonly pluginConfig: Record<string, unknown>;
  readonly sent: Sent[] = [];
  readonly warnings: string[] = [];
  readonly logger = { info: (): void => undefined, warn: (text: string): void => void this.warnings.push(text) };
  answer: () => Response = () => new Response("{}");
  readonly #hooks = new Map<string, (event: HookEvent, context: HookContext) => unknown>();
  readonly #fetch = globalThis.fetch;

  constructor(config: Record<string, unknown> = {}) {
    this.pluginConfig = { baseUrl: GATEWAY, ...config };
    globalThis.fetch = async (input, init) => {
      const request = new Request(input, init);
      this.sent.push({
        url: request.url,
        method: request.method,
        headers: request.headers,
        body: await request.text(),
      });
      return this.answer();
    };
    plugin.register(this);
  }

  on(hook: string, handler: (event: HookEvent, context: HookContext) => unknown): void {
    this.#hooks.set(hook, handler);
  }

  async call(hook: string, context: HookContext, event: HookEvent = {}): Promise<void> {
    await this.#hooks.get(hook)?.(event, context);
  }

  [Symbol.dispose](): void {
    globalThis.fetch = this.#fetch;
  }
}

export function chat(prompt: string): RequestInit {
  return { method: "POST", body: JSON.stringify({ messages: [{ role: "user", content: prompt }] }) };
}
