"""Tool calls in the text of a model, in the format of Qwen and Hermes. Standard library only.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPENED, CLOSED = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_NOT_SPACE = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call in a text: its name and arguments, or `problem`, the reason why it cannot be carried out."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


def requested_calls(text: str) -> list[RequestedCall]:
    """Returns the tool calls of a text, in order; a call that cannot be read has a problem."""
    return [call for _, _, call in call_spans(text)]


def tool_response(result: str) -> str:
    """Returns the result of a call in the same format."""
    return f"<tool_response>\n{result}\n</tool_response>"


def call_spans(text: str) -> Iterator[tuple[int, int, RequestedCall]]:
    """Yields each tool call of a text with its place, tags included: text[begin:end]."""
    end = 0
    while (begin := text.find(OPENED, end)) >= 0:
        content = begin + len(OPENED)
        closed = end_of_call(text, content)
        if closed is None:
            closed = text.find(CLOSED, content)
        if closed < 0:
            yield begin, len(text), RequestedCall("", {}, "a <tool_call> has no </tool_call>")
            return
        end = closed + len(CLOSED)
        yield begin, end, parsed_call(text[content:closed].strip())


def end_of_call(text: str, begin: int) -> int | None:
    """Returns the position of the closing tag behind the JSON value that begins here, whose strings may hold tags; None
    if there is no value, or something else behind it."""
    try:
        _, end = _DECODER.raw_decode(text, _skip_space(text, begin))
    except (ValueError, RecursionError):
        return None
    end = _skip_space(text, end)
    return end if text.startswith(CLOSED, end) else None


def _skip_space(text: str, begin: int) -> int:
    found = _NOT_SPACE.search(text, begin)
    return len(text) if found is None else found.start()


def parsed_call(content: str) -> RequestedCall:
    """Returns the call that the JSON text between the tags requests."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        return RequestedCall("", {}, f"the tool call is not JSON: {error}")
    if (problem := json_problem(value)) is not None:
        return RequestedCall("", {}, f"the tool call is not JSON: {problem}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return RequestedCall("", {}, 'a tool call must be {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return RequestedCall(value["name"], {}, "the arguments of a tool call must be a JSON object")
    return RequestedCall(value["name"], arguments)


def json_problem(value: object) -> str | None:
    """Returns the reason why a value cannot be written as JSON, or None. Python reads more than that: NaN, infinity,
    and halves of surrogate pairs."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


def instructions(signatures: Sequence[Mapping[str, Any]]) -> str:
    """Returns the part of a system prompt that lists tools, in the words of Qwen's chat template."""
    listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in signatures)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
