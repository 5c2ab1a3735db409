"""Tells if a later request of a session continues a turn. Pure functions of two events.

Where the gateway guessed the session, conversations that begin alike share its name. Then only a request that repeats a
turn's request and its answer continues the turn.
"""

from collections.abc import Sequence

from schemas.ids import GUESSED_SESSION
from schemas.records import Message, SessionEvent

_REASONING_END = "</think>"


def is_guessed(session_id: str) -> bool:
    """Returns true if a gateway guessed the session, because its client named none."""
    return session_id.rpartition("/")[2].startswith(GUESSED_SESSION)


def without_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages that were said: clients put the time of day into system messages."""
    return tuple(message for message in messages if message.role != "system")


def by_assistant(message: Message) -> bool:
    """Returns true if the assistant said it."""
    return message.role == "assistant"


def continuation(turn: SessionEvent, later: SessionEvent) -> tuple[Message, ...]:
    """Returns the messages of a later request from a turn's answer on; empty if the request does not certainly continue
    the turn."""
    had, has = without_system(turn.messages), without_system(later.messages)
    certain = len(has) > len(had) and has[: len(had)] == had and _is_answer(turn, has[len(had)])
    return has[len(had) :] if certain else ()


def same_conversation(turn: SessionEvent, last: SessionEvent) -> bool:
    """Returns true if a turn belongs to the conversation of its session's last turn. In a session that its client named
    every turn does."""
    if turn.session_event_id == last.session_event_id or not is_guessed(turn.session_id):
        return True
    return bool(continuation(turn, last))


def _is_answer(turn: SessionEvent, message: Message) -> bool:
    """Returns true if a message is certainly the turn's answer: the same text, or all that follows the turn's
    reasoning. An answer without text is one that called tools."""
    if not by_assistant(message):
        return False
    heard, told = message.content.strip(), turn.response.strip()
    return heard == told or (heard != "" and _REASONING_END in told and told.endswith(heard))
