"""Which session a call belongs to and what kind of turn it is. Pure and stateless: any gateway says the same.

What the client says counts: header before body before default. Who says nothing is guessed at: calls that begin with
the same system and first user message, of the same key and user, are one session, whatever the system message says of
the time; and housekeeping of agents (heartbeats, memory flushes, titles) is told by what such calls look like.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.ids import derived_id
from schemas.records import Message
from tentalis.gateway.failure import Refused
from tentalis.gateway.messages import texts

SESSION_ID, TURN_TYPE, SESSION_DONE = "x-session-id", "x-turn-type", "x-session-done"
USER_ID, WORKER_ID, RECORD = "x-user-id", "x-worker-id", "x-tentalis-record"
BODY_FIELDS = ("session_id", "turn_type", "session_done")
MAIN, SIDE = "main", "side"
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})
# What may stand in a header of the answer, in a URL and in a log line alike.
_NAME = re.compile(r"[\x21-\x7e]{1,200}")


class DecidedBy(StrEnum):
    HEADER = "header"
    BODY = "body"
    DEFAULT = "default"
    HEURISTIC = "heuristic"


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a call belongs. `session_id` is the one on the log, `shown` the one that the client knows; `reason` is what
    a guess was made by."""

    session_id: str
    shown: str
    turn_type: str
    decided_by: DecidedBy
    session_by: DecidedBy
    done: bool
    reason: str = ""


# What the calls look like that agents make beside the conversation. Each is held against the system message, or the
# last user message, or both together (a title is asked for in either).
_SIGNS: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (name, where, re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for name, where, pattern in (
        (
            "heartbeat",
            "user",
            r"\bHEARTBEAT_OK\b|\bread HEARTBEAT\.md\b|^\s*\[?(system )?heartbeat( poll| check)?\]?\W*$",
        ),
        (
            "memory",
            "user",
            r"\bmemory flush\b|\bstore durable memories\b|session (is )?near(ing)? (auto-)?compaction"
            r"|\b(create|write|provide) a (detailed |concise )?summary of (the|our|this) (conversation|session)\b",
        ),
        (
            "title",
            "either",
            r"\b(generate|create|write|provide|give|come up with|suggest|produce)\b[^.\n]{0,80}\b(title|chat name)\b"
            r"[^.\n]{0,80}\b(chat|conversation|thread|session|message|dialogue|discussion|query|request)s?\b"
            r"|\b\d+\s?(-|to|–)\s?\d+[ -]words? (title|summary)\b|\bword-or-less title\b"
            r"|\byou are a (thread |conversation |chat )?title generator\b",
        ),
        (
            "tags",
            "user",
            r"^\s*#{1,4} task:\s*(generate|suggest)\b.{0,120}\b(tags?|follow-up|search quer|queries|autocomplet)"
            r"|\banaly[sz]e if this message indicates a new (conversation )?topic\b",
        ),
    )
)
# The signs stand at the beginning of such a call; a person's long message that quotes one is no such call.
_LOOKED_AT = 1500
# What a system message says of the date and the time of day, beside numbers.
_CALENDAR = re.compile(
    r"[ap]m|(mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun|january|february|march|april|may|june"
    r"|july|august|september|october|november|december|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")


def side_sign(messages: Sequence[Message], body: Mapping[str, Any]) -> str | None:
    """The name of the sign that a call is an agent's housekeeping, None if it has none.

    Example: a last user message "Read HEARTBEAT.md ... reply HEARTBEAT_OK." -> "heartbeat"
    """
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if isinstance(limit, int) and limit <= 1:
        return "probe"
    system = next(texts(messages, "system"), "")[:_LOOKED_AT]
    user = messages[-1].content[:_LOOKED_AT] if messages and messages[-1].role == "user" else ""
    for name, where, pattern in _SIGNS:
        if where == "either" and _brief(messages) and system and pattern.search(system):
            return name
        if user and pattern.search(user) and (where == "user" or _instruction(user, messages)):
            return name
    return None


def _brief(messages: Sequence[Message]) -> bool:
    """A call made for one answer: no assistant has spoken yet."""
    return not any(message.role == "assistant" for message in messages)


def _instruction(user: str, messages: Sequence[Message]) -> bool:
    """Whether the text tells a model what to do with a conversation, rather than ask for a title as people do: the call
    carries the conversation in the message itself, or after it was over."""
    return bool(
        re.search(
            r"#{1,4} task:|<(chat_history|conversation|message|messages|user)>|chat history:|conversation:", user, re.I
        )
        or re.search(
            r"\b(this|the|following|above|our)\s+(chat|conversation|thread|session|dialogue|discussion)\b", user, re.I
        )
    )


def guessed_session(owner: str, user_id: str, messages: Sequence[Message]) -> str:
    """The session of a client that names none: the same for every call that begins with the same system message, the
    date and time in it aside, and the same first user message, of the same key and user."""
    opening = [
        _timeless(next(texts(messages, "system"), "")),
        next(texts(messages, "user"), messages[0].content if messages else ""),
    ]
    return "auto-" + derived_id("session", owner, user_id, opening)


def _timeless(text: str) -> str:
    """Its words without those that may be another with every call: what has a digit in it, and the calendar's.

    >>> _timeless("It is Sunday, 2026-11-22 2:03 PM. Be brief.")
    'It is Be brief.'
    """
    words = text.split()
    changing = {word for word in set(words) if _DIGIT.search(word) or _CALENDAR.fullmatch(word.strip(".,;:()[]"))}
    return " ".join(word for word in words if word not in changing)


def namespaced(namespace: str, shown: str) -> str:
    """The session id on the log of what a client calls `shown`: no two users' sessions have the same."""
    return f"{namespace}/{shown}" if namespace else shown


def turn_of(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    messages: Sequence[Message],
    *,
    namespace: str,
    owner: str,
    user_id: str,
    default: str,
) -> Turn:
    """Where a call belongs.

    `headers`: lower-case names. `namespace`: see `namespaced`. `default`: main, side, or guess.
    Raises Refused (400) for values that are none.
    """
    shown, session_by = _said(headers, body, SESSION_ID, "session_id")
    if shown is None:
        shown, session_by = guessed_session(owner, user_id, messages), DecidedBy.HEURISTIC
    elif not _NAME.fullmatch(shown):
        raise Refused(400, "a session id has 1 to 200 visible ASCII characters, without blanks")
    given, decided_by = _said(headers, body, TURN_TYPE, "turn_type")
    reason = ""
    if given is not None:
        turn_type = given.lower()
        if turn_type not in (MAIN, SIDE):
            raise Refused(400, f"the turn type (header X-Turn-Type or turn_type) is {MAIN} or {SIDE}, not {given!r}")
    elif default == "guess":
        reason = side_sign(messages, body) or ""
        turn_type, decided_by = (SIDE if reason else MAIN), DecidedBy.HEURISTIC
    else:
        turn_type, decided_by = default, DecidedBy.DEFAULT
    done, _ = _said(headers, body, SESSION_DONE, "session_done")
    return Turn(
        namespaced(namespace, shown), shown, turn_type, decided_by, session_by, done is not None and truth(done), reason
    )


def _said(headers: Mapping[str, str], body: Mapping[str, Any], header: str, field: str) -> tuple[str | None, DecidedBy]:
    """What the client says, header before body."""
    value = headers.get(header, "").strip()
    if value:
        return value, DecidedBy.HEADER
    raw = body.get(field)
    if raw is None or raw == "":
        return None, DecidedBy.DEFAULT
    if isinstance(raw, bool):
        return ("true" if raw else "false"), DecidedBy.BODY
    if not isinstance(raw, str | int):
        raise Refused(400, f"{field} must be a text")
    return str(raw), DecidedBy.BODY


def truth(text: str) -> bool:
    """1, true, yes and on are true; 0, false, no, off and nothing are not. Raises Refused (400) for others."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise Refused(400, f"X-Session-Done is one of {', '.join(sorted(_TRUE))}, or left out; not {text[:40]!r}")
    return word in _TRUE


def recorded(headers: Mapping[str, str]) -> bool:
    """Whether the call may be written down: X-Tentalis-Record: off opts out. Raises Refused (400) for another word."""
    word = headers.get(RECORD, "").strip().lower()
    if word not in ("", "on", "off"):
        raise Refused(400, f"X-Tentalis-Record is on or off, not {word[:40]!r}")
    return word != "off"
