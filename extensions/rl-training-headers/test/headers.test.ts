import assert from "node:assert/strict";
import { test } from "node:test";

import { CHAT, GATEWAY, Host, chat } from "./host.ts";

test("a run's requests carry its session id and no session-done header", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "s-1", trigger: "user" }, { prompt: "hello" });
  await fetch(CHAT, chat("hello"));
  const { headers } = host.sent[0]!;
  assert.equal(headers.get("x-session-id"), "s-1");
  assert.equal(headers.get("x-turn-type"), "main");
  assert.equal(headers.get("x-session-done"), null);
});

for (const [trigger, kind] of [
  ["heartbeat", "side"],
  ["memory", "side"],
  ["cron", "side"],
  ["user", "main"],
  ["manual", "main"],
  [undefined, "main"],
] as const) {
  test(`a run triggered by ${trigger} is a ${kind} turn`, async () => {
    using host = new Host();
    await host.call("before_prompt_build", { sessionId: "s", ...(trigger && { trigger }) });
    await fetch(CHAT, chat("hello"));
    assert.equal(host.sent[0]!.headers.get("x-turn-type"), kind);
  });
}

test("existing headers are never overridden, whatever their case", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "s", trigger: "user" });
  await fetch(CHAT, { ...chat("hello"), headers: { "x-SESSION-id": "mine", "X-Turn-Type": "side" } });
  await fetch(new Request(CHAT, { method: "POST", body: "{}", headers: { "X-Session-Id": "mine" } }));
  assert.equal(host.sent[0]!.headers.get("x-session-id"), "mine");
  assert.equal(host.sent[0]!.headers.get("x-turn-type"), "side");
  assert.equal(host.sent[1]!.headers.get("x-session-id"), "mine");
  assert.equal(host.sent[1]!.headers.get("x-turn-type"), "main");
});

test("method, body and other headers of the caller are unchanged", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "s" }, { prompt: "hello" });
  const body = JSON.stringify({ messages: [{ role: "user", content: "hello \u0007 ü" }] });
  await fetch(CHAT, { method: "POST", body, headers: [["Authorization", "Bearer k"]] });
  await fetch(new Request(CHAT, { method: "PUT", body, headers: { authorization: "Bearer k" } }));
  await fetch(new URL(CHAT), { method: "POST", body, headers: new Headers({ Authorization: "Bearer k" }) });
  assert.deepEqual(host.sent.map((one) => one.method), ["POST", "PUT", "POST"]);
  for (const one of host.sent) {
    assert.equal(one.body, body);
    assert.equal(one.headers.get("authorization"), "Bearer k");
    assert.equal(one.headers.get("x-session-id"), "s");
  }
});

for (const url of [
  "http://other.test:8100/v1/chat/completions",
  "http://gateway.test:8101/v1/chat/completions",
  "https://gateway.test:8100/v1/chat/completions",
  "http://gateway.test:8100/v10/chat/completions",
  "http://gateway.test:8100/v1/../admin",
  "http://gateway.test.evil.test:8100/v1/chat/completions",
]) {
  test(`a request to ${url} is unchanged`, async () => {
    using host = new Host();
    await host.call("before_prompt_build", { sessionId: "s" });
    await fetch(url, chat("x"));
    const { headers } = host.sent[0]!;
    assert.deepEqual([headers.get("x-session-id"), headers.get("x-turn-type")], [null, null]);
  });
}

test("a base URL may end with a slash", async () => {
  using host = new Host({ baseUrl: `${GATEWAY}/` });
  await host.call("before_prompt_build", { sessionId: "s" });
  await fetch(CHAT, chat("hello"));
  assert.equal(host.sent[0]!.headers.get("x-session-id"), "s");
});

test("header names and triggers are configurable", async () => {
  using host = new Host({
    sessionIdHeader: "X-Conversation",
    turnTypeHeader: "X-Kind",
    sessionDoneHeader: "X-Over",
    sideTriggers: ["digest"],
  });
  await host.call("before_reset", { sessionId: "s" });
  await host.call("before_prompt_build", { sessionId: "s", trigger: "digest" });
  await fetch(CHAT, chat("hello"));
  const { headers } = host.sent[0]!;
  assert.deepEqual(
    ["x-conversation", "x-kind", "x-over", "x-session-id"].map((name) => headers.get(name)),
    ["s", "side", "true", null],
  );
});

for (const [config, message] of [
  [{ baseUrl: undefined }, /baseUrl/],
  [{ baseUrl: "gateway" }, /baseUrl/],
  [{ baseUrl: "file:///etc/passwd" }, /neither http nor https/],
  [{ turnTypeHeader: "X Turn" }, /turnTypeHeader/],
  [{ sessionIdHeader: "X\r\nEvil" }, /sessionIdHeader/],
  [{ sideTriggers: "cron" }, /sideTriggers/],
  [{ endSessions: "no" }, /endSessions/],
] as const) {
  test(`an invalid configuration is rejected: ${JSON.stringify(config)}`, () => {
    const before = globalThis.fetch;
    try {
      assert.throws(() => new Host(config), message);
    } finally {
      globalThis.fetch = before;
    }
  });
}

test("session ids that a header cannot carry are encoded and stay distinct", async () => {
  using host = new Host();
  for (const sessionId of ["a\r\nX-Evil: 1", "a b", "a%20b", "größe", "\ud800", "x".repeat(201), "x".repeat(202)]) {
    await host.call("before_prompt_build", { sessionId });
    await fetch(CHAT, chat("hello"));
    await host.call("agent_end", { sessionId });
  }
  const values = host.sent.map((one) => one.headers.get("x-session-id")!);
  assert.equal(new Set(values).size, values.length);
  assert.ok(values.every((value) => /^[\x21-\x7e]{1,200}$/.test(value)));
  assert.equal(host.sent[0]!.headers.get("x-evil"), null);
});

test("a fetch that another plugin replaced is wrapped again, without a second header", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "s" });
  const ours = globalThis.fetch;
  globalThis.fetch = (input, init) => ours(input, init);
  await host.call("before_prompt_build", { sessionId: "s" });
  await fetch(CHAT, chat("hello"));
  assert.equal(host.sent.length, 1);
  assert.equal(host.sent[0]!.headers.get("x-session-id"), "s");
});

test("a hook without a session changes nothing, and a stop restores fetch", async () => {
  using host = new Host();
  const before = globalThis.fetch;
  await host.call("before_prompt_build", {});
  assert.equal(globalThis.fetch, before);
  await host.call("before_prompt_build", { sessionKey: "agent:main:main" });
  assert.notEqual(globalThis.fetch, before);
  await fetch(CHAT, chat("hello"));
  assert.equal(host.sent[0]!.headers.get("x-session-id"), "agent:main:main");
  await host.call("gateway_stop", {});
  assert.equal(globalThis.fetch, before);
});
