"""Anthropic's document blocks as text between tags. Pure.

A text model reads no PDF. `tentalis.signals.spoken` takes nothing that follows a tag for the words of the user, so a
document gives no hint and no reward.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from tentalis.gateway.http.errors import APIError


def document_text(block: Mapping[str, Any], where: str) -> str:
    """Returns a document block as text. Raises APIError (400) for one that is not text."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise APIError(400, f"{where}: citations are not supported: ask without them")
    title, context = (_optional_text(block, name, where) for name in ("title", "context"))
    head = f'<document title="{escape(" ".join(title.split()))}">' if title else "<document>"
    lines = [
        head,
        *([f"<context>{escape(context)}</context>"] if context else []),
        _content(block.get("source"), where),
    ]
    return "\n".join([*lines, "</document>"])


def _optional_text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not (value is None or isinstance(value, str)):
        raise APIError(400, f"{where}: a document's {name} must be a string")
    return value or ""


def _content(source: Any, where: str) -> str:
    if not isinstance(source, dict):
        raise APIError(400, f"{where}: a document needs a source, an object")
    kind, content = source.get("type"), source.get("content")
    if kind == "text":
        if not isinstance(source.get("data"), str):
            raise APIError(400, f"{where}: a document's source of type text: data must be a string")
        return str(source["data"])
    if kind == "content" and isinstance(content, str):
        return content
    if kind == "content" and isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise APIError(400, f"{where}: a document's content must be a string or text blocks")
        return "\n".join(part["text"] for part in content)
    named = source.get("media_type", kind)
    raise APIError(400, f"{where}: a document of type {named} cannot be read here: send the document's text")
