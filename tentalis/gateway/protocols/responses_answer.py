"""Translates an answer to OpenAI's responses API: the whole one, and its stream events. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tentalis.gateway.protocols.responses_history import missing_call_id
from tentalis.text.timestamps import now_ms

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_GIVEN_UP = ("abort", "error")
"""Finish reasons of an answer that the backend gave up."""
_NO_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}


@dataclass(frozen=True, slots=True)
class Kept:
    """The response that an answer continues, and whether a later request can continue the answer."""

    previous_response_id: str | None = None
    stored: bool = False


def response_object(
    answer: Mapping[str, Any], event_id: str, body: Mapping[str, Any], kept: Kept = Kept()
) -> dict[str, Any]:
    """Returns a whole chat completion as a response. `body`: the request, as a chat completion's."""
    choice = (answer.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    collected = _ResponseParts(event_id, body, kept)
    collected.note(answer)
    collected.note_end(choice)
    if message.get("content"):
        collected.text_item().add(message["content"])
    for position, call in enumerate(message.get("tool_calls") or ()):
        collected.add_call(position, call)
    collected.finish()
    return collected.response()


@dataclass(slots=True)
class _Item:
    """An item of the output: a text, or the call of a tool. `call`: its index in the chat completion, None for a text;
    `pieces`: the text or the arguments; `place`: its number in the output, None while it is not begun."""

    call: Any = None
    identifier: str = ""
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    place: int | None = None
    closed: bool = False

    @property
    def text(self) -> str:
        """The text or the arguments so far."""
        return "".join(self.pieces)

    def add(self, piece: Any) -> None:
        """Adds a piece of the text or the arguments. Raises TypeError for one that is no text."""
        if not isinstance(piece, str):
            raise TypeError("a piece of an answer is no text")
        self.pieces.append(piece)

    def part(self) -> dict[str, Any]:
        """The content of a text."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as the client sees it."""
        head = {"id": self.identifier, "status": status}
        if self.call is None:
            content = [] if status == "in_progress" else [self.part()]
            return head | {"type": "message", "role": "assistant", "content": content}
        return head | {"type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": self.text}


@dataclass(slots=True)
class _ResponseParts:
    """The answer so far. `items`: those with a place first come, first; a call without a name has none."""

    event_id: str
    body: Mapping[str, Any]
    kept: Kept = Kept()
    items: list[_Item] = field(default_factory=list)
    begun: int = 0
    model: str = ""
    created: int = 0
    usage: dict[str, Any] | None = None
    finish_reason: str = ""

    def note(self, answer: Mapping[str, Any]) -> None:
        """Notes the model, time and token counts of an answer or chunk. Raises ValueError and TypeError for counts that
        are no numbers."""
        self.model = self.model or str(answer.get("model") or "")
        self.created = self.created or int(answer.get("created") or now_ms() // 1000)
        if isinstance(answer.get("usage"), dict):
            self.usage = _usage(answer["usage"])

    def note_end(self, choice: Mapping[str, Any]) -> None:
        """Notes the reason for which a choice ended, if it has."""
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])

    def text_item(self) -> _Item:
        """The text that is being written; begins one after a call of a tool."""
        if not self.items or self.items[-1].call is not None:
            self.items.append(_Item())
            self.begin(self.items[-1])
        return self.items[-1]

    def add_call(self, position: int, call: Mapping[str, Any]) -> tuple[_Item, str]:
        """Adds a call of a tool, or a piece of one; returns it and its new arguments. It begins with its name.
        `position`: its number where the call has none itself."""
        index, function = call.get("index"), call.get("function") or {}
        index = position if index is None else index
        item = next((item for item in self.items if item.call == index), None)
        if item is None:
            given = call.get("id")
            made = missing_call_id(self.event_id, index if isinstance(index, int) else position)
            item = _Item(index, call_id=given if isinstance(given, str) and given else made)
            self.items.append(item)
        if item.place is None:
            item.name += function.get("name") or ""
            if item.name:
                self.begin(item)
        arguments = function.get("arguments") or ""
        item.add(arguments)
        return item, arguments

    def begin(self, item: _Item) -> None:
        """Gives an item its place. The first text has the id under which feedback finds the turn."""
        item.place, self.begun = self.begun, self.begun + 1
        kind = "msg" if item.call is None else "fc"
        item.identifier = f"{kind}_{self.event_id}" + (f"_{item.place}" if item.place else "")

    def finish(self) -> None:
        """An answer without anything is an empty text."""
        if not self.begun:
            self.text_item()

    @property
    def output(self) -> list[_Item]:
        """The items in the order of their places."""
        return sorted((item for item in self.items if item.place is not None), key=lambda item: item.place or 0)

    @property
    def status(self) -> str:
        """The status of the finished answer."""
        if self.finish_reason in _GIVEN_UP:
            return "failed"
        return "incomplete" if self.finish_reason in _INCOMPLETE else "completed"

    def item_status(self, item: _Item) -> str:
        """The status of an item of the finished answer: only its last one may be a part."""
        last = item.place == self.begun - 1
        return "incomplete" if last and self.status != "completed" else "completed"

    def response(self, *, finished: bool = True) -> dict[str, Any]:
        """The response object."""
        status = self.status if finished else "in_progress"
        given_up = {"code": "server_error", "message": f"the backend gave the answer up ({self.finish_reason})"}
        incomplete = {"reason": _INCOMPLETE.get(self.finish_reason)}
        return {
            "id": f"resp_{self.event_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": given_up if status == "failed" else None,
            "incomplete_details": incomplete if status == "incomplete" else None,
            "model": self.model,
            "output": [item.shown(self.item_status(item)) for item in self.output] if finished else [],
            "usage": self.usage if finished else None,
            "store": self.kept.stored,
            "previous_response_id": self.kept.previous_response_id,
            "truncation": "disabled",
            "max_output_tokens": self.body.get("max_tokens"),
            "temperature": self.body.get("temperature"),
            "top_p": self.body.get("top_p"),
            "parallel_tool_calls": self.body.get("parallel_tool_calls", True),
            "tools": [_NO_TOOL | tool["function"] for tool in self.body.get("tools", ())],
            "tool_choice": _tool_choice(self.body.get("tool_choice", "auto")),
        }


def _tool_choice(choice: Any) -> Any:
    return {"type": "function", "name": choice["function"]["name"]} if isinstance(choice, dict) else choice


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    def count(counts: Any, name: str) -> int:
        return int((counts or {}).get(name) or 0)

    asked, answered = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    cached = count(usage.get("prompt_tokens_details"), "cached_tokens")
    reasoning = count(usage.get("completion_tokens_details"), "reasoning_tokens")
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": asked + answered,
    }


class ResponsesStream:
    """One answer: created and in progress; each item with its pieces; then the whole response.

    The pieces of several calls may interleave, as those of a chat completion do: each event names its item.
    """

    def __init__(self, event_id: str, body: Mapping[str, Any], kept: Kept = Kept()) -> None:
        self._answer = _ResponseParts(event_id, body, kept)
        self._started = False
        self._number = 0

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamFormat. Raises ValueError and TypeError for token counts that are no numbers."""
        self._answer.note(chunk)
        events = self._start()
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if delta.get("content"):
                events += self._add_text(delta["content"])
            for position, call in enumerate(delta.get("tool_calls") or ()):
                events += self._add_call(position, call)
            self._answer.note_end(choice)
        return events

    def end(self) -> bytes:
        """See StreamFormat."""
        events = self._start()
        if not self._answer.begun:
            self._answer.finish()
            events += self._added(self._answer.items[-1])
        for item in self._answer.output:
            events += self._close(item, self._answer.item_status(item))
        return events + self._event(f"response.{self._answer.status}", response=self._answer.response())

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamFormat. Beside the fields of the API, `error`: OpenAI's clients raise an exception for it."""
        error = {"message": message, "type": kind, "code": kind, "param": None}
        return self._event("error", code=kind, message=message, param=None, error=error)

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._answer.response(finished=False)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _add_text(self, text: str) -> bytes:
        known = len(self._answer.items)
        item = self._answer.text_item()
        events = self._added(item) if len(self._answer.items) > known else b""
        item.add(text)
        return events + self._piece("response.output_text.delta", item, content_index=0, delta=text, logprobs=[])

    def _add_call(self, position: int, call: Mapping[str, Any]) -> bytes:
        events = b""
        for item in self._answer.output:
            if item.call is None:  # the text is over
                events += self._close(item, "completed")
        begun = self._answer.begun
        item, arguments = self._answer.add_call(position, call)
        if item.place is None:
            return events
        if self._answer.begun > begun:
            events += self._added(item)
            arguments = item.text
        if arguments:
            events += self._piece("response.function_call_arguments.delta", item, delta=arguments)
        return events

    def _added(self, item: _Item) -> bytes:
        shown = item.shown("in_progress") | ({} if item.call is None else {"arguments": ""})
        events = self._event("response.output_item.added", output_index=item.place, item=shown)
        if item.call is None:
            events += self._piece("response.content_part.added", item, content_index=0, part=item.part() | {"text": ""})
        return events

    def _close(self, item: _Item, status: str) -> bytes:
        if item.closed:
            return b""
        item.closed = True
        if item.call is None:
            events = self._piece("response.output_text.done", item, content_index=0, text=item.text, logprobs=[])
            events += self._piece("response.content_part.done", item, content_index=0, part=item.part())
        else:
            events = self._piece("response.function_call_arguments.done", item, name=item.name, arguments=item.text)
        return events + self._event("response.output_item.done", output_index=item.place, item=item.shown(status))

    def _piece(self, kind: str, item: _Item, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.identifier, output_index=item.place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
