"""Checks the messages of a client's request. `tentalis.inference.chat_messages` converts them."""

from typing import Any

from tentalis.gateway.http.errors import APIError


def joined(parts: list[dict[str, Any]]) -> Any:
    """Returns the parts of a message, or one string if all are text: templates of text-only models accept only
    strings."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def checked(messages: Any, most: int) -> list[dict[str, Any]]:
    """Returns the messages if they are a list of at most `most` objects with roles. Raises APIError (400)."""
    if not isinstance(messages, list) or not messages:
        raise APIError(400, "messages must be a list of at least one message")
    if len(messages) > most:
        raise APIError(400, f"there are {len(messages):,} messages; the limit is {most:,}")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise APIError(400, f"messages[{at}] must be an object, not {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise APIError(400, f"messages[{at}].role must be a string")
        if not (content is None or isinstance(content, str | list)):
            raise APIError(400, f"messages[{at}].content must be a string, a list of parts, or null")
        if isinstance(content, list) and not all(isinstance(part, dict | str) for part in content):
            raise APIError(400, f"messages[{at}].content must be a list of objects")
    return messages
