"""Texts and hints of a turn in one cell of a table."""

from __future__ import annotations

from typing import Any

PREVIEW = 40


def short(text: str) -> str:
    """Returns the beginning of a text, on one line and without control characters."""
    flat = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return flat if len(flat) <= PREVIEW else flat[: PREVIEW - 3] + "..."


def hint_text(hint: dict[str, Any]) -> str:
    """Returns a hint with its source: the rule or judge that made it, and whose words they are."""
    said = hint["said"]
    whose = f"{said['source']} {said['author']}".strip() if said else "the whole session"
    if said is None and hint["feedback_id"]:
        whose = f"feedback {hint['feedback_id']}"
    refused = "" if hint["kind"] == "accepted" else f"{hint['kind']} "
    return f'{refused}"{short(" / ".join(hint["hints"]))}" from {whose} by {hint["made_by"]}'
