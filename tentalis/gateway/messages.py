"""Chat messages as clients send them, made into the ones that the log keeps. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.records import Message
from tentalis.gateway.failure import Refused

# Bytes of an image (or sound) that are kept beside the text; of a longer one only that it was there.
KEPT_IMAGE_BYTES = 64 * 1024
# What of a request, beside its messages, a chat template may read.
_TEMPLATE_FIELDS = (
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_REQUEST_FIELDS = (*_TEMPLATE_FIELDS, "tool_choice", "parallel_tool_calls", "response_format")
_ROLES = {"developer": "system"}
_TEXTS = ("text", "input_text", "output_text", "refusal")
_DATA_URL = re.compile(r"^data:([\w.+/-]{0,100})[;,]")


def checked(messages: Any) -> list[dict[str, Any]]:
    """The messages, if they are a list of objects with roles. Raises Refused (400)."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list of at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Refused(400, f"messages[{at}] must be an object, not {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise Refused(400, f"messages[{at}].role must be a text")
        if not (content is None or isinstance(content, str | list)):
            raise Refused(400, f"messages[{at}].content must be a text, a list of parts, or null")
        if isinstance(content, list) and not all(isinstance(part, dict | str) for part in content):
            raise Refused(400, f"messages[{at}].content must hold objects")
    return messages


def text_of(content: Any) -> str:
    """The text of a message's content: parts joined, `[image]` (or another type) for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind in _TEXTS:
        text = part.get("text", part.get("refusal", ""))
        return text if isinstance(text, str) else ""
    return f"[{'image' if 'image' in str(kind) else kind}]"


def unseen(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message holds what its tokens do not say: an image, a sound, a file."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXTS for part in parts)


def normalised(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages of role and text: developer is system, lists are joined, null is empty."""
    return tuple(Message(role=_ROLES.get(m["role"], m["role"]), content=text_of(m.get("content"))) for m in messages)


def unspoken(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """JSON of what of a request its normalised messages do not say: tools and their calls, names, roles that were
    another, and content that is no plain text; "" if there is nothing. Data over KEPT_IMAGE_BYTES is replaced by a
    note.
    """
    kept: dict[str, Any] = {name: body[name] for name in _REQUEST_FIELDS if body.get(name) is not None}
    originals = {
        str(at): {key: _light(value) for key, value in message.items() if key != "role" or value in _ROLES}
        for at, message in enumerate(messages)
        if any(key not in ("role", "content") for key in message)
        or message["role"] in _ROLES
        or not _plain(message.get("content"))
    }
    if originals:
        kept["messages"] = originals
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) if kept else ""


def as_sent(messages: Sequence[Message], request: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a request as the backend got them, and what else of it a chat template reads: what `normalised`
    and `unspoken` were made of. Raises ValueError where `request` is not of that form."""
    kept = json.loads(request) if request else {}
    originals = kept.get("messages", {}) if isinstance(kept, dict) else None
    if not isinstance(originals, dict) or not all(isinstance(each, dict) for each in originals.values()):
        raise ValueError("the rest of the request is no JSON object with messages by their number")
    sent = [{"role": m.role, "content": m.content} | originals.get(str(at), {}) for at, m in enumerate(messages)]
    return sent, {name: kept[name] for name in _TEMPLATE_FIELDS if name in kept}


def _plain(content: Any) -> bool:
    """Whether its text is all there is to say of it. Of several parts nobody knows how a template joins them."""
    if not isinstance(content, list):
        return isinstance(content, str)
    part = content[0] if len(content) == 1 else None
    return isinstance(part, str) or (part is not None and part.get("type") == "text" and len(part) == 2)


def _light(value: Any) -> Any:
    if isinstance(value, str) and len(value) > KEPT_IMAGE_BYTES and (found := _DATA_URL.match(value)):
        return f"data:{found[1]};left-out,{len(value)} characters"
    if isinstance(value, dict):
        if isinstance(value.get("data"), str) and len(value["data"]) > KEPT_IMAGE_BYTES:
            value = value | {"data": f"left out: {len(value['data'])} characters"}
        return {key: _light(each) for key, each in value.items()}
    return [_light(each) for each in value] if isinstance(value, list) else value


def texts(messages: Sequence[Message], role: str) -> Iterator[str]:
    """The texts of one role, in order."""
    return (message.content for message in messages if message.role == role)
