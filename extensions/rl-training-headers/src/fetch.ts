/** A fetch that adds the headers of the run it is called for, and otherwise does what the one below it does. */

import { createHash } from "node:crypto";

import type { Config } from "./config.ts";
import type { Runs } from "./runs.ts";

export type Fetch = typeof globalThis.fetch;

/** Whether a request goes to the base URL or below it. */
export function isBelow(baseUrl: URL, target: URL): boolean {
  const base = baseUrl.pathname.replace(/\/+$/, "");
  return (
    target.origin === baseUrl.origin && (target.pathname === base || target.pathname.startsWith(`${base}/`))
  );
}

function urlOf(input: Parameters<Fetch>[0]): URL | undefined {
  const text = input instanceof Request ? input.url : String(input);
  return URL.canParse(text) ? new URL(text) : undefined;
}

/** What the gateway takes for a session id at most. */
const LONGEST = 200;

/**
 * A session id as a header can carry it: what is no visible ASCII is percent-encoded, and so is the percent sign; one
 * that the gateway would refuse for its length is its hash.
 */
export function headerValue(text: string): string {
  const value = text.replace(/[^\x21-\x24\x26-\x7e]+/gu, (part) => encodeURIComponent(part.toWellFormed()));
  return value.length <= LONGEST ? value : createHash("sha256").update(value).digest("hex");
}

/** What the wrapper remembers: who asked in a session last, and whether that may be recorded, for telling its end. */
export type Keys = Map<string, Headers>;

// On the gateway's log a session is its user's: without the user its end would be that of another session.
const CREDENTIALS = ["authorization", "x-api-key", "x-user-id", "x-tentalis-record"];
const MOST_KEYS = 1024;

function remember(keys: Keys, sessionId: string, headers: Headers): void {
  const kept = new Headers();
  for (const name of CREDENTIALS) {
    const value = headers.get(name);
    if (value !== null) {
      kept.set(name, value);
    }
  }
  keys.delete(sessionId);
  keys.set(sessionId, kept);
  for (const oldest of keys.keys()) {
    if (keys.size <= MOST_KEYS) {
      break;
    }
    keys.delete(oldest);
  }
}

/** Headers that the caller has set itself stay as they are. */
export function withHeaders(below: Fetch, config: Config, runs: Runs, keys: Keys): Fetch {
  return async (input, init) => {
    const target = urlOf(input);
    if (target === undefined || !isBelow(config.baseUrl, target)) {
      return below(input, init);
    }
    const body: unknown = init?.body ?? (input instanceof Request ? await input.clone().text() : undefined);
    const run = runs.of(body);
    if (run === undefined) {
      return below(input, init);
    }
    const headers = new Headers(init?.headers ?? (input instanceof Request ? input.headers : undefined));
    const add = (name: string, value: string): void => {
      if (!headers.has(name)) {
        headers.set(name, value);
      }
    };
    add(config.sessionIdHeader, headerValue(run.sessionId));
    add(config.turnTypeHeader, run.turnType);
    if (runs.hasEnded(run.sessionId)) {
      add(config.sessionDoneHeader, "true");
    }
    if (headers.get(config.sessionIdHeader) === headerValue(run.sessionId)) {
      remember(keys, run.sessionId, headers);
    }
    return below(input, { ...init, headers });
  };
}
