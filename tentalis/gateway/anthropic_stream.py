"""An answer as the stream events of Anthropic, and the words that it shares with whole answers. Pure."""

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


def stop_of(choice: Mapping[str, Any], *, called: bool) -> tuple[str | None, str | None]:
    """(stop reason, stop sequence) of a choice, Nones while it goes on. `called`: it has called a tool; of one that was
    forced OpenAI says no more than stop."""
    reason = choice.get("finish_reason")
    if reason is None:
        return None, None
    sequence = choice.get("stop_reason")
    if reason == "stop" and isinstance(sequence, str):  # vLLM's word for the stop string that was met
        return "stop_sequence", sequence
    if reason == "stop" and called:
        return "tool_use", None
    return _STOP_REASONS.get(reason, "end_turn"), None


def usage_of(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """Tokens in and out."""
    said = usage or {}
    return {
        "input_tokens": int(said.get("prompt_tokens") or 0),
        "output_tokens": int(said.get("completion_tokens") or 0),
    }


def error_of(status: int, message: str) -> dict[str, object]:
    """An error's body and event."""
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


def message_id(event_id: str) -> str:
    """The id of a message: the gateway's own, by which feedback finds the turn, whatever the backend calls it."""
    return f"msg_{event_id}"


def call_id(given: Any) -> str:
    """The id of a tool call, one of our own where the backend gives none."""
    return given if isinstance(given, str) and given else f"toolu_{uuid.uuid4().hex}"


@dataclass(slots=True)
class _Block:
    """A block whose end is not sent yet. `waiting`: deltas not sent either; `call`: its index, None for text."""

    call: Any = None
    identifier: str = ""
    name: str = ""
    arguments: str = ""
    started: bool = False
    waiting: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing more belongs to it, once another block has begun: of a tool's input the JSON says so."""
        if self.call is None:
            return True
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True

    def start(self) -> dict[str, Any]:
        """What it begins as."""
        if self.call is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": self.identifier, "name": self.name, "input": {}}

    def delta(self, text: str) -> dict[str, Any]:
        """A piece of it."""
        if self.call is None:
            return {"type": "text_delta", "text": text}
        return {"type": "input_json_delta", "partial_json": text}


class MessagesStream:
    """One answer: a start, per block start, deltas and stop, then a delta and the stop.

    Anthropic's blocks come one after the other, OpenAI's deltas of several tool calls may come in any order. The block
    that is open is sent as it comes; those behind it wait until it is whole.
    """

    def __init__(self, event_id: str) -> None:
        self._event_id = event_id
        self._started = False
        self._called: set[Any] = set()
        self._blocks: deque[_Block] = deque()
        self._index = 0
        self._reason: tuple[str | None, str | None] = (None, None)
        self._usage = usage_of(None)

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamShape. Raises ValueError for a piece of a tool call that was whole, and for numbers of tokens that
        are none."""
        events = b"" if self._started else self._start(chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage = usage_of(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self._text(delta["content"])
            for at, call in enumerate(delta.get("tool_calls") or ()):
                self._call(call, at)
            events += self._flushed()
            if choice.get("finish_reason") is not None:
                self._reason = stop_of(choice, called=bool(self._called))
        return events

    def end(self) -> bytes:
        """See StreamShape."""
        events = b"" if self._started else self._start({})
        events += self._flushed(end=True)
        reason, sequence = self._reason
        delta = {"stop_reason": reason or "end_turn", "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage}
        return events + _event(last) + _event({"type": "message_stop"})

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamShape."""
        return _event(error_of(status, message))

    def _start(self, chunk: Mapping[str, Any]) -> bytes:
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

    def _text(self, text: str) -> None:
        if not self._blocks or self._blocks[-1].call is not None:
            self._blocks.append(_Block())
        self._blocks[-1].waiting.append(text)

    def _call(self, call: Mapping[str, Any], at: int) -> None:
        index, function = call.get("index", at), call.get("function") or {}
        block = next((block for block in self._blocks if block.call == index), None)
        arguments = function.get("arguments") or ""
        if block is None:
            if index in self._called:
                if arguments.strip():
                    raise ValueError(f"the input of the tool call {index} goes on behind its end")
                return
            self._called.add(index)
            block = _Block(index, call_id(call.get("id")))
            self._blocks.append(block)
        if not block.started:
            block.name += function.get("name") or ""
        if arguments:
            block.arguments += arguments
            block.waiting.append(arguments)

    def _flushed(self, *, end: bool = False) -> bytes:
        """What can be sent of the blocks: all at the end, else the first, and the next where that one is whole."""
        events = b""
        while self._blocks:
            block = self._blocks[0]
            if not block.started and (end or block.call is None or block.name):
                block.started = True
                events += _event({"type": "content_block_start", "index": self._index, "content_block": block.start()})
            if block.started:
                for text in block.waiting:
                    events += _event({"type": "content_block_delta", "index": self._index, "delta": block.delta(text)})
                block.waiting.clear()
            if not end and (len(self._blocks) == 1 or not block.started or not block.whole):
                break
            events += _event({"type": "content_block_stop", "index": self._index})
            self._index += 1
            self._blocks.popleft()
        return events


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
