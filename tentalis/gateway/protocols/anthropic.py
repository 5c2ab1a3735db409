"""Translates Anthropic's messages API to OpenAI's chat completions: request bodies and answers. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from tentalis.gateway.http.errors import APIError
from tentalis.gateway.protocols.anthropic_stream import (
    MessagesStream,
    call_id,
    error_body,
    message_id,
    stop_reason_of,
    usage_counts,
)
from tentalis.gateway.protocols.documents import document_text
from tentalis.gateway.protocols.messages import joined
from tentalis.gateway.protocols.openai import StreamFormat

# Precedes the images of tool results, in a user message that the gateway adds.
_TOOL_IMAGES_NOTE = {"type": "text", "text": "Images of the tool results above:"}
# Fields with the same name and meaning in both APIs.
_SHARED_FIELDS = ("model", "temperature", "top_p", "top_k", "stream", "session_id", "turn_type", "session_done")


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise APIError(400, f"{where} must be a string or a list of blocks")
    return content


def _image(source: Any, where: str) -> dict[str, Any]:
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
    elif isinstance(source, dict) and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        raise APIError(400, f"{where}: an image needs a source of type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _messages(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Translates an Anthropic message to one or more OpenAI messages: OpenAI has separate messages for tool results."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    translated: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for block in _blocks(content, where):
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": str(block.get("text", ""))})
            case "image":
                parts.append(_image(block.get("source"), where))
            case "document":
                parts.append({"type": "text", "text": document_text(block, where)})
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": str(block.get("name", "")), "arguments": arguments}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case "tool_result":
                text, result_images = _result(block, where)
                images += result_images
                translated.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
            case "thinking" | "redacted_thinking":
                continue  # a backend cannot use the thinking of another model
            case other:
                raise APIError(400, f"{where}: blocks of type {other!r} are not supported")
    if images:
        translated.append({"role": "user", "content": [_TOOL_IMAGES_NOTE, *images]})
    if parts or calls or not translated:
        message: dict[str, Any] = {"role": role, "content": joined(parts)}
        if calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        translated.append(message)
    return translated


def _result(block: Mapping[str, Any], where: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns a tool result's text and its images.

    OpenAI's tool messages have no error flag and hold no images. The text itself marks an error, as tools do; the
    images follow in a user message.
    """
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
            case "document":
                texts.append(document_text(part, where))
            case other:
                raise APIError(400, f"{where}: blocks of type {other!r} in a tool result are not supported")
    text = "\n".join(texts)
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return text, images


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise APIError(400, "tools must be objects with a name")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in choices:
        raise APIError(400, "tool_choice.type must be auto, any, tool or none")
    return choices[kind]


def _thinking(thinking: Any) -> dict[str, Any]:
    """Arguments of the backend's chat template, under the names by which templates switch thinking on or off."""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise APIError(400, "thinking.type must be enabled, adaptive or disabled")
    return dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")


class MessagesProtocol:
    """POST /v1/messages."""

    path = "/v1/chat/completions"
    chat = True
    native_errors = False

    def body(self, request_body: dict[str, Any]) -> dict[str, Any]:
        """See ClientProtocol."""
        limit = request_body.get("max_tokens")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise APIError(400, "max_tokens must be a whole number of at least 1")
        return self.prompt(request_body) | {"max_tokens": limit}

    def prompt(self, request_body: dict[str, Any]) -> dict[str, Any]:
        """Same as `body`, for a request that may omit max_tokens. Raises APIError (400)."""
        messages: list[dict[str, Any]] = []
        if request_body.get("system"):
            blocks = _blocks(request_body["system"], "system")
            messages.append({"role": "system", "content": "\n".join(str(block.get("text", "")) for block in blocks)})
        given_messages = request_body.get("messages")
        if not isinstance(given_messages, list) or not given_messages:
            raise APIError(400, "messages must be a list of at least one message")
        for index, message in enumerate(given_messages):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ("user", "assistant", "system"):
                raise APIError(400, f"messages[{index}].role must be user, assistant or system")
            messages += _messages(role, message.get("content"), f"messages[{index}].content")
        body: dict[str, Any] = {
            name: request_body[name] for name in _SHARED_FIELDS if request_body.get(name) is not None
        }
        body["messages"] = messages
        if request_body.get("stop_sequences"):
            body["stop"] = request_body["stop_sequences"]
        if request_body.get("tools"):
            if not isinstance(request_body["tools"], list):
                raise APIError(400, "tools must be a list")
            body["tools"] = [_tool(tool) for tool in request_body["tools"]]
        if request_body.get("tool_choice") is not None:
            body["tool_choice"] = _tool_choice(request_body["tool_choice"])
            if request_body["tool_choice"].get("disable_parallel_tool_use"):
                body["parallel_tool_calls"] = False
        if request_body.get("thinking") is not None:
            body["chat_template_kwargs"] = _thinking(request_body["thinking"])
        if body.get("stream") is True:
            body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See ClientProtocol. Leaves out the added messages with tool images: the tool results already mention the
        images."""
        return [
            message
            for message in body["messages"]
            if not (isinstance(message["content"], list) and message["content"][0] is _TOOL_IMAGES_NOTE)
        ]

    def answer(self, answer: dict[str, Any], event_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """See ClientProtocol."""
        choice = (answer.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        content: list[dict[str, Any]] = []
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            content.append(
                {
                    "type": "tool_use",
                    "id": call_id(call.get("id")),
                    "name": function.get("name", ""),
                    "input": _tool_input(function.get("arguments")),
                }
            )
        reason, sequence = stop_reason_of(choice, has_tool_calls=bool(message.get("tool_calls")))
        return {
            "id": message_id(event_id),
            "type": "message",
            "role": "assistant",
            "model": answer.get("model", ""),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_counts(answer.get("usage")),
        }

    def stream(self, event_id: str, body: Mapping[str, Any]) -> StreamFormat:
        """See ClientProtocol."""
        return MessagesStream(event_id)

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """See ClientProtocol."""
        return error_body(status, message)


def _tool_input(text: Any) -> dict[str, Any]:
    """A tool's input. Text of the model that is not a JSON object is passed on under `_unparsed`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": text}
