"""Anthropic's messages on a backend that speaks OpenAI's chat completions: bodies, answers and stream events. Pure."""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from tentalis.gateway.failure import Refused
from tentalis.gateway.shapes import StreamShape

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
# Fields that have the same name and meaning in both.
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "session_id", "turn_type", "session_done")


def stop_of(choice: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(stop reason, stop sequence) of a choice, Nones while it goes on."""
    reason = choice.get("finish_reason")
    if reason is None:
        return None, None
    sequence = choice.get("stop_reason")
    if reason == "stop" and isinstance(sequence, str):  # vLLM's word for the stop string that was met
        return "stop_sequence", sequence
    return _STOP_REASONS.get(reason, "end_turn"), None


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
                result = [
                    part if part["type"] == "text" else {"type": "text", "text": "[image]"}
                    for part in _result_parts(block.get("content"), where)
                ]
                text = "\n".join(part["text"] for part in result)
                found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
            case "thinking" | "redacted_thinking":
                continue  # a backend has its own, and cannot read another's
            case other:
                raise Refused(400, f"{where}: blocks of type {other!r} cannot be passed on")
    if parts or calls or not found:
        said: dict[str, Any] = {"role": role, "content": _joined(parts)}
        if calls:
            said |= {"tool_calls": calls, "content": said["content"] or None}
        found.append(said)
    return found


def _result_parts(content: Any, where: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    return [
        {"type": "text", "text": str(block.get("text", ""))} if block.get("type") == "text" else {"type": "image"}
        for block in _blocks(content, where)
    ]


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


def _usage(usage: Mapping[str, Any] | None) -> dict[str, int]:
    said = usage or {}
    return {
        "input_tokens": int(said.get("prompt_tokens") or 0),
        "output_tokens": int(said.get("completion_tokens") or 0),
    }


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
        body |= {"messages": messages, "max_tokens": limit}
        if given.get("stop_sequences"):
            body["stop"] = given["stop_sequences"]
        if given.get("tools"):
            if not isinstance(given["tools"], list):
                raise Refused(400, "tools must be a list")
            body["tools"] = [_tool(tool) for tool in given["tools"]]
        if given.get("tool_choice") is not None:
            body["tool_choice"] = _choice(given["tool_choice"])
        if body.get("stream") is True:
            body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See Shape."""
        return body["messages"]

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
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
                    "id": call.get("id") or f"toolu_{uuid.uuid4().hex}",
                    "name": function.get("name", ""),
                    "input": _object(function.get("arguments")),
                }
            )
        reason, sequence = stop_of(choice)
        return {
            "id": f"msg_{answer.get('id') or uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": answer.get("model", ""),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(answer.get("usage")),
        }

    def stream(self) -> StreamShape:
        """See Shape."""
        return MessagesStream()

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """See Shape."""
        return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


def _object(text: Any) -> dict[str, Any]:
    """A tool's input. What a model wrote that is no JSON object is passed on under a name of its own."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": text}


class MessagesStream:
    """One answer as the events of Anthropic: a start, per block start, deltas and stop, then a delta and the stop."""

    def __init__(self) -> None:
        self._started = False
        self._block = -1
        self._open: str | None = None  # "text", or the index of a tool call
        self._reason: tuple[str | None, str | None] = (None, None)
        self._usage: Mapping[str, Any] | None = None

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamShape."""
        events = b"" if self._started else self._start(chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if delta.get("content"):
                events += self._opened("text", {"type": "text", "text": ""})
                events += self._delta({"type": "text_delta", "text": delta["content"]})
            for at, call in enumerate(delta.get("tool_calls") or ()):
                events += self._call(call, at)
            if choice.get("finish_reason") is not None:
                self._reason = stop_of(choice)
        return events

    def end(self) -> bytes:
        """See StreamShape."""
        events = b"" if self._started else self._start({})
        reason, sequence = self._reason
        usage = _usage(self._usage)
        delta = {"stop_reason": reason or "end_turn", "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": usage}
        return events + self._closed() + _event(last) + _event({"type": "message_stop"})

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamShape."""
        return _event({"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}})

    def _start(self, chunk: Mapping[str, Any]) -> bytes:
        self._started = True
        message = {
            "id": f"msg_{chunk.get('id') or uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model", ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})

    def _call(self, call: Mapping[str, Any], at: int) -> bytes:
        function = call.get("function") or {}
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": call.get("id") or f"toolu_{uuid.uuid4().hex}",
            "name": function.get("name") or "",
            "input": {},
        }
        events = self._opened(f"call {call.get('index', at)}", block)
        if function.get("arguments"):
            events += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        return events

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        """Begins a block, unless it is the one that is open."""
        if self._open == kind:
            return b""
        events = self._closed()
        self._block += 1
        self._open = kind
        return events + _event({"type": "content_block_start", "index": self._block, "content_block": block})

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._block, "delta": delta})


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
