"""The conversation of a recorded turn, as chat messages: what a response that continues it begins with. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from schemas.records import SessionEvent
from tentalis.gateway.http.errors import APIError
from tentalis.inference.chat_messages import as_sent, was_shortened

CALL_IDS = "call_ids"
"""Field of a recorded request's rest: the ids of the answer's tool calls, in their order."""
_INSTRUCTED = "instructed"
"""Field of a recorded request's rest: true if the first message holds instructions, and is not an item of the input."""


def with_call_ids(request: str, call_ids: Sequence[str]) -> str:
    """Returns the rest of a request (`unspoken`) with the ids of the tool calls in its answer."""
    return _with_field(request, CALL_IDS, list(call_ids)) if any(call_ids) else request


def with_instructed(request: str) -> str:
    """Returns the rest of a request (`unspoken`) with a note that its first message holds instructions."""
    return _with_field(request, _INSTRUCTED, True)


def is_instructed(turn: SessionEvent) -> bool:
    """True if the first message of a turn holds instructions. Raises ValueError if the rest of its request is no JSON
    object."""
    return bool(turn.messages) and _kept_fields(turn).get(_INSTRUCTED) is True


def missing_call_id(event_id: str, position: int) -> str:
    """The id of a tool call to which the backend gave none."""
    return f"call_{event_id}_{position}"


def conversation(turn: SessionEvent) -> list[dict[str, Any]]:
    """Returns the messages of a turn's request and its answer, as a backend gets them.

    Raises APIError (400) if the record does not hold them whole.
    """
    try:
        messages, _ = as_sent(turn.messages, turn.request)
        kept = _kept_fields(turn)
    except ValueError as error:
        raise APIError(
            400,
            f"previous_response_id: the record of resp_{turn.session_event_id} is not a chat request ({error}): send "
            "the whole conversation as input",
        ) from error
    if was_shortened(messages):
        raise APIError(
            400,
            f"previous_response_id: resp_{turn.session_event_id} follows an image, a sound or a file that is too large "
            "to be kept: send the whole conversation as input",
        )
    answer: dict[str, Any] = {"role": "assistant", "content": turn.response or (None if turn.tool_calls else "")}
    if turn.tool_calls:
        ids = kept.get(CALL_IDS, ())
        answer["tool_calls"] = [
            {
                "id": (ids[at] if at < len(ids) else "") or missing_call_id(turn.session_event_id, at),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for at, call in enumerate(turn.tool_calls)
        ]
    return [*messages, answer]


def _kept_fields(turn: SessionEvent) -> dict[str, Any]:
    kept = json.loads(turn.request) if turn.request else {}
    if not isinstance(kept, dict):
        raise ValueError("the rest of the request is not a JSON object")
    return kept


def _with_field(request: str, name: str, value: Any) -> str:
    kept = json.loads(request) if request else {}
    return json.dumps(kept | {name: value}, ensure_ascii=False, separators=(",", ":"))
