"""Anthropic's messages on a backend that speaks OpenAI's chat completions: bodies and answers. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from tentalis.gateway.anthropic_stream import MessagesStream, call_id, error_of, message_id, stop_of, usage_of
from tentalis.gateway.failure import Refused
from tentalis.gateway.shapes import StreamShape

# Before the images of tool results, in a message of their own that nobody has said.
_IMAGES_OF_TOOLS = {"type": "text", "text": "Images of the tool results above:"}
# Fields that have the same name and meaning in both.
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "session_id", "turn_type", "session_done")


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refused(400, f"{where} must be a text or a list of blocks")
    return content


def _image(source: Any, where: str) -> dict[str, Any]:
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
    elif isinstance(source, dict) and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        raise Refused(400, f"{where}: an image needs a source of type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _messages(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """One of Anthropic's messages as one or more of OpenAI's: tool results are messages of their own there."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for block in _blocks(content, where):
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": str(block.get("text", ""))})
            case "image":
                parts.append(_image(block.get("source"), where))
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": str(block.get("name", "")), "arguments": arguments}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case "tool_result":
                text, shown = _result(block, where)
                images += shown
                found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
            case "thinking" | "redacted_thinking":
                continue  # a backend has its own, and cannot read another's
            case other:
                raise Refused(400, f"{where}: blocks of type {other!r} cannot be passed on")
    if images:
        found.append({"role": "user", "content": [_IMAGES_OF_TOOLS, *images]})
    if parts or calls or not found:
        said: dict[str, Any] = {"role": role, "content": _joined(parts)}
        if calls:
            said |= {"tool_calls": calls, "content": said["content"] or None}
        found.append(said)
    return found


def _result(block: Mapping[str, Any], where: str) -> tuple[str, list[dict[str, Any]]]:
    """A tool's result as a text, and its images. OpenAI's tool messages have no mark for an error and hold no images:
    the one is said in the text, as tools say it themselves, the others come in a user's message behind it."""
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    content = block.get("content")
    for part in () if content is None else _blocks(content, where):
        match part.get("type"):
            case "text":
                texts.append(str(part.get("text", "")))
            case "image":
                images.append(_image(part.get("source"), where))
                texts.append("[image]")
            case other:
                raise Refused(400, f"{where}: blocks of type {other!r} in a tool's result cannot be passed on")
    text = "\n".join(texts)
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return text, images


def _joined(parts: list[dict[str, Any]]) -> Any:
    """Text alone as a text: templates of text models know nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise Refused(400, "tools must be objects with a name")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    named = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in named:
        raise Refused(400, "tool_choice.type must be auto, any, tool or none")
    return named[kind]


def _thinking(thinking: Any) -> dict[str, Any]:
    """Arguments of the backend's chat template, by the names under which templates know whether to think."""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise Refused(400, "thinking.type must be enabled, adaptive or disabled")
    return dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")


class MessagesShape:
    """POST /v1/messages."""

    path = "/v1/chat/completions"
    chat = True
    native_errors = False

    def body(self, given: dict[str, Any]) -> dict[str, Any]:
        """See Shape."""
        limit = given.get("max_tokens")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise Refused(400, "max_tokens must be a whole number of at least 1")
        return self.prompt(given) | {"max_tokens": limit}

    def prompt(self, given: dict[str, Any]) -> dict[str, Any]:
        """As `body`, of a request that need not say how long its answer may be. Raises Refused (400)."""
        messages: list[dict[str, Any]] = []
        if given.get("system"):
            blocks = _blocks(given["system"], "system")
            messages.append({"role": "system", "content": "\n".join(str(block.get("text", "")) for block in blocks)})
        said = given.get("messages")
        if not isinstance(said, list) or not said:
            raise Refused(400, "messages must be a list of at least one message")
        for at, message in enumerate(said):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ("user", "assistant", "system"):
                raise Refused(400, f"messages[{at}].role must be user or assistant")
            messages += _messages(role, message.get("content"), f"messages[{at}].content")
        body: dict[str, Any] = {name: given[name] for name in _SAME if given.get(name) is not None}
        body["messages"] = messages
        if given.get("stop_sequences"):
            body["stop"] = given["stop_sequences"]
        if given.get("tools"):
            if not isinstance(given["tools"], list):
                raise Refused(400, "tools must be a list")
            body["tools"] = [_tool(tool) for tool in given["tools"]]
        if given.get("tool_choice") is not None:
            body["tool_choice"] = _choice(given["tool_choice"])
            if given["tool_choice"].get("disable_parallel_tool_use"):
                body["parallel_tool_calls"] = False
        if given.get("thinking") is not None:
            body["chat_template_kwargs"] = _thinking(given["thinking"])
        if body.get("stream") is True:
            body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See Shape. The images of tool results are no next message: the results say that they were there."""
        return [
            message
            for message in body["messages"]
            if not (isinstance(message["content"], list) and message["content"][0] is _IMAGES_OF_TOOLS)
        ]

    def answer(self, answer: dict[str, Any], event_id: str) -> dict[str, Any]:
        """See Shape."""
        choice = (answer.get("choices") or [{}])[0]
        said = choice.get("message") or {}
        content: list[dict[str, Any]] = []
        if said.get("content"):
            content.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls") or ():
            function = call.get("function") or {}
            content.append(
                {
                    "type": "tool_use",
                    "id": call_id(call.get("id")),
                    "name": function.get("name", ""),
                    "input": _object(function.get("arguments")),
                }
            )
        reason, sequence = stop_of(choice, called=bool(said.get("tool_calls")))
        return {
            "id": message_id(event_id),
            "type": "message",
            "role": "assistant",
            "model": answer.get("model", ""),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(answer.get("usage")),
        }

    def stream(self, event_id: str) -> StreamShape:
        """See Shape."""
        return MessagesStream(event_id)

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """See Shape."""
        return error_of(status, message)


def _object(text: Any) -> dict[str, Any]:
    """A tool's input. What a model wrote that is no JSON object is passed on under a name of its own."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": text}
