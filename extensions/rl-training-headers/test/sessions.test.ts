import assert from "node:assert/strict";
import { test } from "node:test";

import { Runs, lastUserText } from "../src/runs.ts";
import { CHAT, GATEWAY, Host, chat } from "./host.ts";

const session = (host: Host, at: number): string | null => host.sent[at]!.headers.get("x-session-id");

test("of two active runs, a request belongs to the one whose prompt it contains", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana" }, { prompt: "plan my week" });
  await host.call("before_prompt_build", { sessionId: "ben" }, { prompt: "mend my bike" });
  await fetch(CHAT, chat("[Monday 10:00] mend my bike"));
  await fetch(CHAT, chat("plan my week"));
  assert.deepEqual([session(host, 0), session(host, 1)], ["ben", "ana"]);
});

test("of two active runs with the same prompt, none is chosen", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana" }, { prompt: "hello" });
  await host.call("before_prompt_build", { sessionId: "ben" }, { prompt: "hello" });
  await fetch(CHAT, chat("hello"));
  await fetch(CHAT, chat("something else"));
  assert.deepEqual([session(host, 0), session(host, 1)], [null, null]);
  assert.equal(host.sent[0]!.headers.get("x-turn-type"), null);
});

test("after the end of the other run, requests belong to the remaining one", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana", runId: "1" }, { prompt: "hello" });
  await host.call("before_prompt_build", { sessionId: "ben", runId: "2" }, { prompt: "hello" });
  await host.call("agent_end", { sessionId: "ana", runId: "1" });
  await fetch(CHAT, chat("hello"));
  assert.equal(session(host, 0), "ben");
});

test("the late end of a run does not end its successor, and after the last end no header is added", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana", runId: "1" });
  await host.call("before_prompt_build", { sessionId: "ana", runId: "2" });
  await host.call("agent_end", { sessionId: "ana", runId: "1" });
  await fetch(CHAT, chat("x"));
  await host.call("agent_end", { sessionId: "ana", runId: "2" });
  await fetch(CHAT, chat("x"));
  assert.deepEqual([session(host, 0), session(host, 1)], ["ana", null]);
});

test("requests of a session after its reset are marked as done", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana", runId: "1" });
  await fetch(CHAT, chat("x"));
  await host.call("agent_end", { sessionId: "ana", runId: "1" });
  await host.call("before_reset", { sessionId: "ana" });
  await host.call("before_prompt_build", { sessionId: "ana", runId: "2", trigger: "memory" });
  await fetch(CHAT, chat("x"));
  assert.deepEqual(
    host.sent.map(({ headers }) => [headers.get("x-turn-type"), headers.get("x-session-done")]),
    [["main", null], ["side", "true"]],
  );
});

test("a session that the user continues is not done", async () => {
  using host = new Host();
  await host.call("before_reset", { sessionKey: "agent:main" });
  await host.call("before_prompt_build", { sessionKey: "agent:main" });
  await fetch(CHAT, chat("x"));
  assert.equal(host.sent[0]!.headers.get("x-session-done"), null);
});

test("the end of a session is sent with the key of its last request", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "a/b" });
  await fetch(CHAT, { ...chat("x"), headers: { Authorization: "Bearer k", Cookie: "c" } });
  await host.call("agent_end", { sessionId: "a/b" });
  await host.call("session_end", {}, { sessionId: "a/b" });
  await host.call("session_end", {}, { sessionId: "a/b" });
  assert.equal(host.sent.length, 2);
  const end = host.sent[1]!;
  assert.equal(end.url, `${GATEWAY}/sessions/a%2Fb/end`);
  assert.equal(end.method, "POST");
  assert.equal(end.headers.get("authorization"), "Bearer k");
  assert.equal(end.headers.get("cookie"), null);
});

test("the end of a session is sent with its user and its recording header", async () => {
  using host = new Host();
  await host.call("before_prompt_build", { sessionId: "ana" });
  await fetch(CHAT, { ...chat("x"), headers: { "X-User-Id": "u-1", "X-Tentalis-Record": "off" } });
  await host.call("session_end", {}, { sessionId: "ana" });
  const end = host.sent[1]!;
  assert.deepEqual([end.headers.get("x-user-id"), end.headers.get("x-tentalis-record")], ["u-1", "off"]);
});

test("the end is not sent for sessions without requests, nor if endSessions is off", async () => {
  using host = new Host({ endSessions: false });
  await host.call("session_end", {}, { sessionId: "never" });
  await host.call("before_prompt_build", { sessionId: "ana" });
  await fetch(CHAT, chat("x"));
  await host.call("session_end", {}, { sessionId: "ana" });
  assert.equal(host.sent.length, 1);
});

test("a gateway that refuses or is unreachable causes a warning, not an error in OpenClaw", async () => {
  using host = new Host();
  for (const answer of [() => new Response("no", { status: 500 }), () => { throw new TypeError("away"); }]) {
    await host.call("before_prompt_build", { sessionId: "ana" });
    host.answer = () => new Response("{}");
    await fetch(CHAT, chat("x"));
    host.answer = answer;
    await host.call("session_end", {}, { sessionId: "ana" });
  }
  assert.equal(host.warnings.length, 2);
  assert.match(host.warnings[0]!, /500/);
  assert.match(host.warnings[1]!, /away/);
});

test("the last user message is found in both formats, and nowhere else", () => {
  const user = (content: unknown): unknown => ({ role: "user", content });
  const text = (...messages: unknown[]): string => lastUserText(JSON.stringify({ messages }));
  assert.equal(text(user("a"), { role: "assistant", content: "b" }), "a");
  assert.equal(text(user("a"), user([{ type: "text", text: "b" }, { type: "image_url" }])), "b");
  assert.equal(text(user("a"), user([{ type: "tool_result", content: "b" }])), "a");
  assert.equal(text(), "");
  for (const body of [undefined, "", "no json", "null", "[]", '{"messages":{}}', '{"messages":[null]}', new Blob([])]) {
    assert.equal(lastUserText(body), "");
  }
});

test("runs whose end was never reported do not accumulate", () => {
  const runs = new Runs();
  for (let at = 0; at < 3000; at += 1) {
    runs.begin({ sessionId: `s${at}`, runId: undefined, turnType: "main", prompt: `prompt ${at};` });
    runs.end(`s${at}`);
  }
  const of = (prompt: string): string | undefined => runs.of(chat(prompt).body)?.sessionId;
  assert.equal(of("prompt 1;"), undefined);
  assert.equal(of("prompt 2999;"), "s2999");
  assert.equal(runs.hasEnded("s1"), false);
  assert.equal(runs.hasEnded("s2999"), true);
});
