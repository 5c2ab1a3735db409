"""Prepares chat messages for a model's template: joined text, tool calls, and tools for a template that knows none."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tentalis.text.tool_calls import CLOSED, OPENED, instructions, tool_response

_TOOLS = re.compile(r"\btools\b")


class InvalidMessages(Exception):
    """A message that no template can render; the message of the error names the reason."""


class ChatPrompt:
    """The form of messages that a chat template reads.

    A template that does not read tools gets them in the system message, in the words of Qwen's template; one that does
    not read `tool_calls` gets calls and results as text, in the same format.
    """

    def __init__(self, chat_template: Any) -> None:
        template = json.dumps(chat_template) if isinstance(chat_template, dict) else chat_template or ""
        self._reads_tools = _TOOLS.search(template) is not None
        self._reads_calls = "tool_calls" in template

    def prepared(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Returns the messages and the tools for the template. Raises InvalidMessages."""
        made = [_with_text(message) for message in messages]
        made = [_with_objects(message) for message in made] if self._reads_calls else _spelled_out(made)
        if not tools or self._reads_tools:
            return made, None if tools is None else [dict(tool) for tool in tools]
        first, rest = (made[0], made[1:]) if made and made[0]["role"] == "system" else ({"content": ""}, made)
        listed = f"{first['content']}\n\n{instructions(tools)}".lstrip()
        return [{"role": "system", "content": listed}, *rest], None


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Joins content given as a list of text parts: templates of text models accept only a string."""
    if "role" not in message:
        raise InvalidMessages("Every message needs a role.")
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": "" if content is None else content}
    if not all(isinstance(part, dict) for part in content):
        raise InvalidMessages("Every part of a message's content must be an object.")
    invalid = [part.get("type") for part in content if part.get("type") != "text"]
    if invalid:
        raise InvalidMessages(f"Content of type {invalid[0]!r} is not supported: this is a text model.")
    return {**message, "content": "".join(part["text"] for part in content)}


def _functions(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions that a message calls, arguments as objects where they are JSON of an object."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise InvalidMessages("Every entry of tool_calls must be an object with function.name and function.arguments.")
    return [{**call["function"], "arguments": _arguments(call["function"].get("arguments"))} for call in calls]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the arguments of tool calls objects, which templates write as JSON; OpenAI's API has them as text."""
    functions = _functions(message)
    if not functions:
        return dict(message)
    calls = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


def _spelled_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Writes tool calls and results as text. Results that follow each other become one message of the user."""
    made: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        role, content = str(message["role"]), message["content"]
        if role == "tool":
            result = tool_response(content)
            if before == "tool":
                made[-1]["content"] += f"\n{result}"
            else:
                made.append({"role": "user", "content": result})
        elif functions := _functions(message):
            lines = [_spelled_call(function) for function in functions]
            made.append({"role": role, "content": "\n".join([content, *lines] if content else lines)})
        else:
            made.append(dict(message))
        before = role
    return made


def _spelled_call(function: Mapping[str, Any]) -> str:
    call = {"name": function.get("name"), "arguments": function["arguments"]}
    return f"{OPENED}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSED}"
