"""Translates an answer to Anthropic's stream events, and the fields that streams share with whole answers. Pure."""

import json
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def stop_reason_of(choice: Mapping[str, Any], *, has_tool_calls: bool) -> tuple[str | None, str | None]:
    """(stop reason, stop sequence) of a choice, both None while it is unfinished. `has_tool_calls`: the choice has
    called a tool; for a forced tool call OpenAI reports only `stop`."""
    reason = choice.get("finish_reason")
    if reason is None:
        return None, None
    sequence = choice.get("stop_reason")
    if reason == "stop" and isinstance(sequence, str):  # vLLM gives the matched stop string here
        return "stop_sequence", sequence
    if reason == "stop" and has_tool_calls:
        return "tool_use", None
    return _STOP_REASONS.get(reason, "end_turn"), None


def usage_counts(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """Input and output token counts."""
    counts = usage or {}
    return {
        "input_tokens": int(counts.get("prompt_tokens") or 0),
        "output_tokens": int(counts.get("completion_tokens") or 0),
    }


def error_body(status: int, message: str) -> dict[str, object]:
    """An error as a response body and as a stream event."""
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


def message_id(event_id: str) -> str:
    """The id of a message. It holds the gateway's event id, not the backend's id, so that feedback finds the turn."""
    return f"msg_{event_id}"


def call_id(given: Any) -> str:
    """The id of a tool call, generated if the backend gives none."""
    return given if isinstance(given, str) and given else f"toolu_{uuid.uuid4().hex}"


@dataclass(slots=True)
class _Block:
    """A block whose end is not sent yet. `pending`: unsent deltas; `call`: index of its tool call, None for text."""

    call: Any = None
    identifier: str = ""
    name: str = ""
    arguments: str = ""
    started: bool = False
    pending: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if the block is complete once another block has begun. A tool's input is complete if its JSON parses."""
        if self.call is None:
            return True
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True

    def start(self) -> dict[str, Any]:
        """The content block of the start event."""
        if self.call is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": self.identifier, "name": self.name, "input": {}}

    def delta(self, text: str) -> dict[str, Any]:
        """The delta of one piece of the block."""
        if self.call is None:
            return {"type": "text_delta", "text": text}
        return {"type": "input_json_delta", "partial_json": text}


class MessagesStream:
    """One answer: a message start; start, deltas and stop of each block; then a message delta and the message stop.

    Anthropic's blocks follow one another, while OpenAI's deltas of several tool calls may interleave. The first open
    block is streamed as it arrives; later blocks wait until it is complete.
    """

    def __init__(self, event_id: str) -> None:
        self._event_id = event_id
        self._started = False
        self._tool_calls: set[Any] = set()
        self._blocks: deque[_Block] = deque()
        self._index = 0
        self._stop: tuple[str | None, str | None] = (None, None)
        self._usage = usage_counts(None)

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamFormat. Raises ValueError for a piece of a tool call that was already complete, and for invalid
        token counts."""
        events = b"" if self._started else self._start_message(chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage = usage_counts(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self._add_text(delta["content"])
            for position, call in enumerate(delta.get("tool_calls") or ()):
                self._add_tool_call(call, position)
            events += self._flush()
            if choice.get("finish_reason") is not None:
                self._stop = stop_reason_of(choice, has_tool_calls=bool(self._tool_calls))
        return events

    def end(self) -> bytes:
        """See StreamFormat."""
        events = b"" if self._started else self._start_message({})
        events += self._flush(end=True)
        reason, sequence = self._stop
        delta = {"stop_reason": reason or "end_turn", "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage}
        return events + _event(last) + _event({"type": "message_stop"})

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamFormat."""
        return _event(error_body(status, message))

    def _start_message(self, chunk: Mapping[str, Any]) -> bytes:
        self._started = True
        message = {
            "id": message_id(self._event_id),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model", ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})

    def _add_text(self, text: str) -> None:
        if not self._blocks or self._blocks[-1].call is not None:
            self._blocks.append(_Block())
        self._blocks[-1].pending.append(text)

    def _add_tool_call(self, call: Mapping[str, Any], position: int) -> None:
        index, function = call.get("index", position), call.get("function") or {}
        block = next((block for block in self._blocks if block.call == index), None)
        arguments = function.get("arguments") or ""
        if block is None:
            if index in self._tool_calls:
                if arguments.strip():
                    raise ValueError(f"the input of tool call {index} continues after its end")
                return
            self._tool_calls.add(index)
            block = _Block(index, call_id(call.get("id")))
            self._blocks.append(block)
        if not block.started:
            block.name += function.get("name") or ""
        if arguments:
            block.arguments += arguments
            block.pending.append(arguments)

    def _flush(self, *, end: bool = False) -> bytes:
        """The events that can be sent now: of all blocks at the end, else of the first block and, once a block is
        complete, of the next."""
        events = b""
        while self._blocks:
            block = self._blocks[0]
            if not block.started and (end or block.call is None or block.name):
                block.started = True
                events += _event({"type": "content_block_start", "index": self._index, "content_block": block.start()})
            if block.started:
                for text in block.pending:
                    events += _event({"type": "content_block_delta", "index": self._index, "delta": block.delta(text)})
                block.pending.clear()
            if not end and (len(self._blocks) == 1 or not block.started or not block.complete):
                break
            events += _event({"type": "content_block_stop", "index": self._index})
            self._index += 1
            self._blocks.popleft()
        return events


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
