"""Prepares untrusted texts for a judge's prompt: shortens them, and fences them against prompt injection."""

from schemas.ids import sha256_hex
from schemas.records import Task

_HEAD = 0.6


def clipped(text: str, limit: int) -> str:
    """Shortens a text to about `limit` characters: its beginning, the number of characters left out, and its end.

    >>> clipped("abcdefghij", 5)
    'abc\\n[... 5 characters left out ...]\\nij'
    """
    if len(text) <= limit:
        return text
    head = round(limit * _HEAD)
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def fenced(name: str, text: str) -> str:
    """Puts a text between two marks that it cannot contain, because they include its hash."""
    mark = f"{name} {sha256_hex(text.encode())[:12]}"
    return f"<<<{mark}>>>\n{text}\n<<<end of {mark}>>>"


def request_of(task: Task) -> str:
    """Returns the task's request: the last user message, else the last message."""
    user_messages = [message.content for message in task.messages if message.role == "user"]
    return user_messages[-1] if user_messages else task.messages[-1].content
