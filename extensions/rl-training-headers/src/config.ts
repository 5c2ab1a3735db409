/** The configuration, with the defaults that openclaw.plugin.json documents. */

export interface Config {
  readonly baseUrl: URL;
  readonly sessionIdHeader: string;
  readonly turnTypeHeader: string;
  readonly sessionDoneHeader: string;
  readonly sideTriggers: ReadonlySet<string>;
  readonly endSessions: boolean;
}

export class ConfigError extends Error {}

const HEADER_NAME = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/;

function headerName(given: Record<string, unknown>, key: string, fallback: string): string {
  const name = given[key] ?? fallback;
  if (typeof name !== "string" || !HEADER_NAME.test(name)) {
    throw new ConfigError(`${key}: ${JSON.stringify(name)} is not a valid header name`);
  }
  return name;
}

/** Reads the configuration. Throws ConfigError, which names the setting and the problem. */
export function readConfig(given: Record<string, unknown> = {}): Config {
  const text = given["baseUrl"];
  if (typeof text !== "string" || !URL.canParse(text)) {
    throw new ConfigError(
      `baseUrl: ${JSON.stringify(text)} is not a URL; give that of the gateway, for example http://127.0.0.1:8200/v1`,
    );
  }
  const baseUrl = new URL(text);
  if (baseUrl.protocol !== "http:" && baseUrl.protocol !== "https:") {
    throw new ConfigError(`baseUrl: ${text} is neither http nor https`);
  }
  const triggers = given["sideTriggers"] ?? ["heartbeat", "memory", "cron"];
  if (!Array.isArray(triggers) || !triggers.every((trigger) => typeof trigger === "string")) {
    throw new ConfigError("sideTriggers: expected a list of strings");
  }
  const endSessions = given["endSessions"] ?? true;
  if (typeof endSessions !== "boolean") {
    throw new ConfigError("endSessions: expected true or false");
  }
  return {
    baseUrl,
    sessionIdHeader: headerName(given, "sessionIdHeader", "X-Session-Id"),
    turnTypeHeader: headerName(given, "turnTypeHeader", "X-Turn-Type"),
    sessionDoneHeader: headerName(given, "sessionDoneHeader", "X-Session-Done"),
    sideTriggers: new Set(triggers as string[]),
    endSessions,
  };
}
