/** A wrapper of fetch that adds the headers of the run to which a request belongs. */

import { createHash } from "node:crypto";

import type { Config } from "./config.ts";
import type { Runs } from "./runs.ts";

export type Fetch = typeof globalThis.fetch;

/** Returns true if a request goes to the base URL or below it. */
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

/** The longest session id that the gateway accepts. */
const LONGEST = 200;

/**
 * Encodes a session id for a header: percent-encodes the percent sign and all but visible ASCII. An id that is too long
 * for the gateway is replaced by its sha256.
 */
export function headerValue(text: string): string {
  const value = text.replace(/[^\x21-\x24\x26-\x7e]+/gu, (part) => encodeURIComponent(part.toWellFormed()));
  return value.length <= LONGEST ? value : createHash("sha256").update(value).digest("hex");
}

/** Credentials, user and recording header of the last request per session, for the request that ends the session. */
export type Keys = Map<string, Headers>;

// The gateway keeps sessions per user: without the user, the end would apply to another session.
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

/** Wraps a fetch. Headers that the caller has set are not changed. */
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
