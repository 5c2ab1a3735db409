"""Determines a call's session and turn type. Pure and stateless: every gateway decides the same.

The client's values come first: header before body before default. Without them the gateway guesses. Calls of the same
key and user that begin with the same system message (dates and times aside) and first user message are one session.
`housekeeping` recognises the calls that agents make beside the conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.ids import GUESSED_SESSION, derived_id
from schemas.records import Message
from tentalis.gateway.calls.housekeeping import side_sign
from tentalis.gateway.http.errors import APIError
from tentalis.inference.chat_messages import texts

SESSION_ID, TURN_TYPE, SESSION_DONE = "x-session-id", "x-turn-type", "x-session-done"
USER_ID, WORKER_ID, RECORD = "x-user-id", "x-worker-id", "x-tentalis-record"
BODY_FIELDS = ("session_id", "turn_type", "session_done")
MAIN, SIDE = "main", "side"
CHAT_ENVIRONMENT = "chat"
"""The environment of turns and of tasks without another."""
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})
# Valid in a response header, in a URL and in a log line.
_SESSION_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,200}")


class DecidedBy(StrEnum):
    HEADER = "header"
    BODY = "body"
    PREVIOUS_RESPONSE = "previous_response"
    EPISODE = "episode"
    DEFAULT = "default"
    HEURISTIC = "heuristic"


@dataclass(frozen=True, slots=True)
class CallSession:
    """A call's session and turn type. `session_id`: the id on the log; `client_session_id`: the id that the client
    knows; `reason`: the sign that a guess is based on."""

    session_id: str
    client_session_id: str
    turn_type: str
    decided_by: DecidedBy
    session_by: DecidedBy
    done: bool
    reason: str = ""


# Words of dates and times in a system message, besides numbers.
_CALENDAR_WORD = re.compile(
    r"[ap]m|(mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun|january|february|march|april|may|june"
    r"|july|august|september|october|november|december|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")
READ_CHARS = 64 * 1024
"""Characters read of a system message or first user message."""
# Characters used of a longer system message: its dates and times move the end of what is read.
_USED_CHARS = 48 * 1024


def derived_session_id(owner: str, user_id: str, messages: Sequence[Message]) -> str:
    """The session id for a client that names none: the same for all calls of the same key and user that begin with the
    same system message (dates and times aside) and the same first user message. Of each, READ_CHARS are read; the
    length of a longer user message counts too."""
    said = next(texts(messages, "user"), messages[0].content if messages else "")
    if len(said) > READ_CHARS:
        said = f"{said[:READ_CHARS]} {len(said)}"
    conversation_start = [_without_changing_words(next(texts(messages, "system"), "")), said]
    return GUESSED_SESSION + derived_id("session", owner, user_id, conversation_start)


def _without_changing_words(text: str) -> str:
    """The text without words that may change with every call: those with digits, and names of days and months. Of a
    text longer than READ_CHARS, its beginning.

    >>> _without_changing_words("It is Sunday, 2026-11-22 2:03 PM. Be brief.")
    'It is Be brief.'
    """
    words = text[:READ_CHARS].split()
    changing = {word for word in set(words) if _DIGIT.search(word) or _CALENDAR_WORD.fullmatch(word.strip(".,;:()[]"))}
    kept = " ".join(word for word in words if word not in changing)
    return kept if len(text) <= READ_CHARS else kept[:_USED_CHARS]


def namespaced(namespace: str, client_session_id: str) -> str:
    """The id on the log of a client's session `client_session_id`; different for different users."""
    return f"{namespace}/{client_session_id}" if namespace else client_session_id


def client_session(namespace: str, session_id: str) -> str:
    """The client's id of a session on the log; the inverse of `namespaced`."""
    return session_id.removeprefix(f"{namespace}/") if namespace else session_id


def call_session(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    messages: Sequence[Message],
    *,
    namespace: str,
    owner: str,
    user_id: str,
    default: str,
    continued: str = "",
) -> CallSession:
    """Determines the session and turn type of a call.

    `headers`: with lower-case names. `namespace`: see `namespaced`. `default`: main, side, or guess. `continued`: the
    session of the turn that the call continues, which the client need not name.
    Raises APIError (400) for invalid values.
    """
    client_session_id, session_by = _declared(headers, body, SESSION_ID, "session_id")
    if client_session_id is None and continued:
        client_session_id, session_by = continued, DecidedBy.PREVIOUS_RESPONSE
    elif client_session_id is None:
        client_session_id, session_by = derived_session_id(owner, user_id, messages), DecidedBy.HEURISTIC
    elif not _SESSION_ID_PATTERN.fullmatch(client_session_id):
        raise APIError(400, "a session id must have 1 to 200 visible ASCII characters, without spaces")
    declared_type, decided_by = _declared(headers, body, TURN_TYPE, "turn_type")
    reason = ""
    if declared_type is not None:
        turn_type = declared_type.lower()
        if turn_type not in (MAIN, SIDE):
            raise APIError(
                400, f"the turn type (X-Turn-Type or turn_type) must be {MAIN} or {SIDE}, not {declared_type!r}"
            )
    elif default == "guess":
        reason = side_sign(messages, body) or ""
        turn_type, decided_by = (SIDE if reason else MAIN), DecidedBy.HEURISTIC
    else:
        turn_type, decided_by = default, DecidedBy.DEFAULT
    declared_done, _ = _declared(headers, body, SESSION_DONE, "session_done")
    return CallSession(
        namespaced(namespace, client_session_id),
        client_session_id,
        turn_type,
        decided_by,
        session_by,
        declared_done is not None and parse_flag(declared_done),
        reason,
    )


def _declared(
    headers: Mapping[str, str], body: Mapping[str, Any], header: str, field: str
) -> tuple[str | None, DecidedBy]:
    """The client's value and its source, header before body."""
    value = headers.get(header, "").strip()
    if value:
        return value, DecidedBy.HEADER
    raw = body.get(field)
    if raw is None or raw == "":
        return None, DecidedBy.DEFAULT
    if isinstance(raw, bool):
        return ("true" if raw else "false"), DecidedBy.BODY
    if not isinstance(raw, str | int):
        raise APIError(400, f"{field} must be a string")
    return str(raw), DecidedBy.BODY


def parse_flag(text: str) -> bool:
    """Parses a flag: 1, true, yes and on, or 0, false, no, off and "". Raises APIError (400) for others."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise APIError(400, f"X-Session-Done must be one of {', '.join(sorted(_TRUE))}, or left out; not {text[:40]!r}")
    return word in _TRUE


def recorded(headers: Mapping[str, str]) -> bool:
    """True if the call may be recorded; X-Tentalis-Record: off opts out. Raises APIError (400) for another value."""
    word = headers.get(RECORD, "").strip().lower()
    if word not in ("", "on", "off"):
        raise APIError(400, f"X-Tentalis-Record must be on or off, not {word[:40]!r}")
    return word != "off"
