"""How texts of others are put before a judge: cut to size, and fenced in so that they cannot speak to it."""

from schemas.ids import sha256_hex
from schemas.records import Task

_HEAD = 0.6


def clipped(text: str, limit: int) -> str:
    """A text of at most about `limit` characters: its beginning and its end, and how much lies between.

    >>> clipped("abcdefghij", 5)
    'abc\\n[... 5 characters left out ...]\\nij'
    """
    if len(text) <= limit:
        return text
    head = round(limit * _HEAD)
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def fenced(name: str, text: str) -> str:
    """A text between two marks that it cannot contain: they are made of its own hash."""
    mark = f"{name} {sha256_hex(text.encode())[:12]}"
    return f"<<<{mark}>>>\n{text}\n<<<end of {mark}>>>"


def request_of(task: Task) -> str:
    """What was asked: the last user message, else the last message."""
    asked = [message.content for message in task.messages if message.role == "user"]
    return asked[-1] if asked else task.messages[-1].content
