"""Translates OpenAI's responses API to chat completions: request bodies. Pure. Answers: `responses_answer.py`."""

from collections.abc import Mapping
from typing import Any

from schemas.records import SessionEvent
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.protocols.messages import joined
from tentalis.gateway.protocols.openai import ChatProtocol, StreamFormat
from tentalis.gateway.protocols.responses_answer import Kept, ResponsesStream, response_object
from tentalis.gateway.protocols.responses_history import conversation, is_instructed, with_instructed

# Fields with the same name and meaning in both APIs.
_SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "parallel_tool_calls",
    "session_id",
    "turn_type",
    "session_done",
)
PREVIOUS = "previous_response_id"
_NOT_KEPT = "the gateway keeps no such thing: send previous_response_id, or the whole conversation as input"
# Fields that would change the answer, and that nothing here can follow.
_REFUSED_FIELDS = {
    "conversation": _NOT_KEPT,
    "prompt": "the gateway keeps no prompts: send instructions and input",
    "background": "no answer is made in the background: ask for a stream",
    "top_logprobs": "log-probs are not given here: /v1/chat/completions gives them",
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def previous_response(request_body: Mapping[str, Any]) -> str | None:
    """The id of the response that a request continues. Raises APIError (400) for a value that is no id."""
    given = request_body.get(PREVIOUS)
    if given is None or given == "":
        return None
    return _string(given, PREVIOUS)


class ResponsesProtocol(ChatProtocol):
    """POST /v1/responses. A request holds its whole conversation, or names the response that it continues.

    Args:
        earlier: the recorded turn that the request continues.
        stored: a later request can continue the answer.
    """

    def __init__(self, earlier: SessionEvent | None = None, *, stored: bool = False) -> None:
        self._earlier = earlier
        self._kept = Kept(None if earlier is None else f"resp_{earlier.session_event_id}", stored)

    def body(self, request_body: dict[str, Any]) -> dict[str, Any]:
        """See ClientProtocol. New instructions replace those of the turn that is continued. System and developer items
        stay."""
        for name, reason in _REFUSED_FIELDS.items():
            if request_body.get(name):
                raise APIError(400, f"{name}: {reason}")
        if request_body.get("truncation") not in (None, "disabled"):
            raise APIError(400, "truncation must be disabled: the gateway shortens no conversation")
        include = request_body.get("include")
        if isinstance(include, list) and "message.output_text.logprobs" in include:
            raise APIError(400, f"include: {_REFUSED_FIELDS['top_logprobs']}")
        body = {name: request_body[name] for name in _SHARED_FIELDS if request_body.get(name) is not None}
        instructions = _instructions(request_body.get("instructions"))
        body["messages"] = instructions + self._history(bool(instructions)) + _messages(request_body.get("input"))
        body |= _limit(request_body.get("max_output_tokens"))
        body |= _tools(request_body.get("tools"), request_body.get("tool_choice"))
        body |= _text(_object(request_body, "text"))
        effort = _object(request_body, "reasoning").get("effort")
        if effort is not None:
            body["reasoning_effort"] = effort
        if body.get("stream") is True:
            body["stream_options"] = {"include_usage": True}
        return body

    def answer(self, answer: dict[str, Any], event_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """See ClientProtocol."""
        return response_object(answer, event_id, body, self._kept)

    def stream(self, event_id: str, body: Mapping[str, Any]) -> StreamFormat:
        """See ClientProtocol."""
        return ResponsesStream(event_id, body, self._kept)

    def recorded_request(self, request_body: Mapping[str, Any], request: str) -> str:
        """Returns the rest of a request (`unspoken`) as it is recorded: with a note if the first message holds
        instructions, of this request or of the turn that it continues. `request_body`: what `body` has translated."""
        kept = self._earlier is not None and is_instructed(self._earlier)
        return with_instructed(request) if kept or request_body.get("instructions") else request

    def _history(self, instructed: bool) -> list[dict[str, Any]]:
        """The messages of the turn that is continued. `instructed`: the request has instructions of its own."""
        if self._earlier is None:
            return []
        messages = conversation(self._earlier)
        return messages[1:] if instructed and is_instructed(self._earlier) else messages


def _object(request_body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request_body.get(name)
    if not (value is None or isinstance(value, dict)):
        raise APIError(400, f"{name} must be an object")
    return value or {}


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise APIError(400, f"{where} must be a string")
    return value


def _instructions(instructions: Any) -> list[dict[str, Any]]:
    if instructions is None or instructions == "":
        return []
    return [{"role": "system", "content": _string(instructions, "instructions")}]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Translates the input: a text of the user, or items."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise APIError(400, "input must be a text or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(given):
        _add_item(messages, item, f"input[{at}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds an item. A call of a tool joins the message of the assistant before it, as in a chat completion."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not (isinstance(role, str) and role in _ROLES):
                raise APIError(400, f"{where}.role must be one of {', '.join(_ROLES)}")
            content = joined(_parts(item.get("content"), f"{where}.content"))
            messages.append({"role": _ROLES[role], "content": content})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {name: _string(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
            call = {"id": _string(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = joined(_parts(item.get("output"), f"{where}.output"))
            if not isinstance(content, str):
                raise APIError(400, f"{where}.output: only text is supported: send images in a message of the user")
            call_id = _string(item.get("call_id"), f"{where}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning":
            pass  # a backend cannot use the thinking of another model
        case "item_reference":
            raise APIError(400, f"{where}: {_NOT_KEPT}")
        case other:
            raise APIError(400, f"{where}: items of type {other!r} are not supported")


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise APIError(400, f"{where} must be a text or a list of parts")
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": _string(part.get("text"), f"{where}.text")}
        case "refusal":
            return {"type": "text", "text": _string(part.get("refusal"), f"{where}.refusal")}
        case "input_image" if isinstance(part.get("image_url"), str):
            detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
            return {"type": "image_url", "image_url": {"url": part["image_url"]} | detail}
        case "input_image":
            raise APIError(400, f"{where}: an image needs image_url, a string: the gateway keeps no files")
        case other:
            raise APIError(400, f"{where}: parts of type {other!r} are not supported")


def _limit(limit: Any) -> dict[str, Any]:
    if limit is None:
        return {}
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise APIError(400, "max_output_tokens must be a whole number of at least 1")
    return {"max_tokens": limit}


def _tools(tools: Any, choice: Any) -> dict[str, Any]:
    if not (tools is None or isinstance(tools, list)):
        raise APIError(400, "tools must be a list")
    translated = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools or ())]
    chosen = _tool_choice(choice)
    if not translated and chosen in (None, "auto", "none"):
        return {}  # backends refuse a choice without tools
    return {"tools": translated} | ({} if chosen is None else {"tool_choice": chosen})


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise APIError(400, f"{where}: tools of type {kind!r} are not supported: the gateway runs no tools")
    function = {"name": _string(tool.get("name"), f"{where}.name")}
    known = ("description", "parameters", "strict")
    return {
        "type": "function",
        "function": function | {name: tool[name] for name in known if tool.get(name) is not None},
    }


def _tool_choice(choice: Any) -> Any:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _string(choice.get("name"), "tool_choice.name")}}
    raise APIError(400, "tool_choice must be auto, none, required, or a function")


def _text(text: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer, and its verbosity."""
    body = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    form = _object(text, "format")
    match form.get("type", "text"):
        case "text":
            return body
        case "json_object":
            return body | {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            return body | {"response_format": {"type": "json_schema", "json_schema": schema}}
        case other:
            raise APIError(400, f"text.format.type must be text, json_object or json_schema, not {other!r}")
