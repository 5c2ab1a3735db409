"""Turns the tool calls in a model's text into those of OpenAI's API, whole or as the text arrives. Pure.

The format is that of Qwen and Hermes (tentalis/text/tool_calls.py). A whole answer that is a call without tags counts
too: small models write `{"name": ..., "arguments": {...}}` alone, or in a block of code.
"""

import json
import uuid
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from tentalis.text.tool_calls import CLOSED, OPENED, RequestedCall, call_spans, end_of_call, parsed_call

_FENCE = "```"
# How a whole answer that is a call without tags may begin.
_UNTAGGED = ("{", f"{_FENCE}json", f"{_FENCE}\n{{")


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text, or a tool call in OpenAI's format."""

    text: str = ""
    call: dict[str, Any] | None = None


class ToolCallStream:
    """The tool calls of one answer as its text arrives. `names`: the tools that an answer without tags may call.

    A call is returned once it is complete. A call that cannot be read stays text. White space beside a call is dropped.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._held = ""
        self._begun = False  # a part was returned
        self._after_call = False

    def push(self, text: str) -> list[AnswerPart]:
        """Takes the next piece of text. Returns the parts that are certain now."""
        self._held += text
        if not self._begun and self._names and _may_be_untagged(self._held):
            return []
        parts: list[AnswerPart] = []
        while (begin := self._held.find(OPENED)) >= 0:
            content = begin + len(OPENED)
            # Read again only when a closing tag has arrived: an earlier one was a part of a string.
            arrived = max(content, len(self._held) - len(text) - len(CLOSED))
            closed = end_of_call(self._held, content) if self._held.find(CLOSED, arrived) >= 0 else None
            if closed is None:  # what follows decides if this is a call
                break
            call = _openai_call(parsed_call(self._held[content:closed].strip()))
            end = closed + len(CLOSED)
            parts += self._text(self._held[:end]) if call is None else self._call(self._held[:begin], call)
            self._held = self._held[end:]
        certain = len(self._held) - _undecided(self._held) if begin < 0 else len(self._held[:begin].rstrip())
        parts += self._text(self._held[:certain])
        self._held = self._held[certain:]
        return parts

    def finish(self) -> list[AnswerPart]:
        """Returns the remaining parts at the end of the answer."""
        held, self._held = self._held, ""
        if not self._begun and (untagged := _untagged_call(held, self._names)) is not None:
            return self._call("", untagged)
        parts: list[AnswerPart] = []
        done = 0
        for begin, end, requested in call_spans(held):
            if (call := _openai_call(requested)) is not None:
                parts += self._call(held[done:begin], call)
                done = end
        return parts + self._text(held[done:])

    def _text(self, text: str) -> list[AnswerPart]:
        text = text.lstrip() if self._after_call else text
        if not text:
            return []
        self._begun, self._after_call = True, False
        return [AnswerPart(text)]

    def _call(self, before: str, call: dict[str, Any]) -> list[AnswerPart]:
        parts = self._text(before.rstrip())
        self._begun = self._after_call = True
        return [*parts, AnswerPart(call=call)]


def answer_parts(text: str, names: Set[str]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text of a whole answer without its tool calls, and the calls. `names`: as of ToolCallStream."""
    stream = ToolCallStream(names)
    parts = [*stream.push(text), *stream.finish()]
    return "".join(part.text for part in parts), [part.call for part in parts if part.call is not None]


def _may_be_untagged(text: str) -> bool:
    """True if a whole answer that begins so may be a call without tags."""
    begun = text.lstrip()
    return any(begun.startswith(start) or start.startswith(begun) for start in _UNTAGGED)


def _untagged_call(text: str, names: Set[str]) -> dict[str, Any] | None:
    """Returns the call that a whole answer is, None if it is none: JSON with the name of a tool and its arguments."""
    content = text.strip()
    if content.startswith(_FENCE) and content.endswith(_FENCE):
        content = content.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
    if not content.startswith("{") or '"arguments"' not in content:
        return None
    requested = parsed_call(content)
    return _openai_call(requested) if requested.name in names else None


def _openai_call(requested: RequestedCall) -> dict[str, Any] | None:
    """Returns a call in OpenAI's format, None if it cannot be read or written as JSON."""
    if requested.problem is not None:
        return None
    try:
        arguments = json.dumps(requested.arguments, ensure_ascii=False, allow_nan=False)
        (requested.name + arguments).encode()
    except (ValueError, RecursionError):  # NaN, a lone surrogate, deep nesting
        return None
    function = {"name": requested.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _undecided(text: str) -> int:
    """Returns the number of characters at the end that may begin a tag, white space before it included."""
    most = min(len(OPENED) - 1, len(text))
    tag = next((size for size in range(most, 0, -1) if OPENED.startswith(text[-size:])), 0)
    before = text[: len(text) - tag]
    return len(text) - len(before.rstrip())
