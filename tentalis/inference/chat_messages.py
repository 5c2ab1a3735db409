"""Converts clients' chat messages to those on the log, and back. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.records import Message

# An image (or sound) of up to this many bytes is kept beside the text; a longer one is replaced by a note.
KEPT_IMAGE_BYTES = 64 * 1024
# Request fields, besides messages, that a chat template may read.
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
# The notes that replace a data URL, and the data of a sound or a file.
_URL_NOTE = re.compile(r"data:[\w.+/-]{0,100};left-out,[0-9]+ characters")
_DATA_NOTE = re.compile(r"left out: [0-9]+ characters")


def text_of(content: Any) -> str:
    """The text of a message's content: parts joined, `[image]` (or another type) for each part that is not text."""
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
    """True if a message holds content that its tokens do not represent: an image, a sound, a file."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXTS for part in parts)


def normalised(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Reduces messages to role and text: developer becomes system, lists are joined, null becomes empty."""
    return tuple(Message(role=_ROLES.get(m["role"], m["role"]), content=text_of(m.get("content"))) for m in messages)


def unspoken(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns, as JSON, what `normalised` drops from a request or changes: tools and tool calls, names, roles, and
    content that is not plain text; "" if there are none. Data over KEPT_IMAGE_BYTES is replaced by a note.
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
    """Returns a request's messages as the backend got them, and its other fields that a chat template reads. Inverse of
    `normalised` and `unspoken`. Raises ValueError if `request` was not written by `unspoken`."""
    kept = json.loads(request) if request else {}
    originals = kept.get("messages", {}) if isinstance(kept, dict) else None
    if not isinstance(originals, dict) or not all(isinstance(each, dict) for each in originals.values()):
        raise ValueError("the rest of the request is not a JSON object with messages by index")
    sent = [{"role": m.role, "content": m.content} | originals.get(str(at), {}) for at, m in enumerate(messages)]
    return sent, {name: kept[name] for name in _TEMPLATE_FIELDS if name in kept}


def was_shortened(kept: Any) -> bool:
    """True if `unspoken` replaced data by a note in this message, or part of one."""
    if isinstance(kept, str):
        return _URL_NOTE.fullmatch(kept) is not None
    if isinstance(kept, dict):
        data = kept.get("data")
        noted = isinstance(data, str) and _DATA_NOTE.fullmatch(data) is not None
        return noted or any(was_shortened(value) for value in kept.values())
    return isinstance(kept, list) and any(was_shortened(value) for value in kept)


def _plain(content: Any) -> bool:
    """True if the text represents the content fully. Several parts do not qualify: templates join them differently."""
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
