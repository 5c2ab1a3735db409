"""Makes the table of values in the chart's README from the comments of values.yaml. Pure.

A comment that begins with `# --` describes the key below it; further comment lines continue it. A key without such a
comment is not listed, but its children are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_.-]+):")


@dataclass(frozen=True, slots=True)
class ChartValue:
    """One described key of values.yaml."""

    path: tuple[str, ...]
    default: Any
    text: str


def described(text: str) -> Iterator[ChartValue]:
    """Yields the described keys in the order of the file."""
    content = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#") and comment is not None:
            comment.append(stripped.removeprefix("#").strip())
        elif found := _KEY.match(line):
            indent = len(found["indent"])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, found["key"])]
            keys = tuple(key for _, key in path)
            if comment is not None:
                yield ChartValue(keys, at(content, keys), " ".join(comment))
            comment = None
        else:
            comment = None


def at(content: Any, path: tuple[str, ...]) -> Any:
    """Returns the value at a path of keys."""
    for key in path:
        content = content[key]
    return content


def table(text: str) -> str:
    """Returns the table of values as Markdown."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in described(text):
        default = json.dumps(value.default, ensure_ascii=False)
        lines.append(f"| `{'.'.join(value.path)}` | `{default}` | {value.text.replace('|', '&#124;')} |")
    return "\n".join(lines)


def rewritten(page: str, values: str) -> str:
    """Replaces the table between the two comments of the README. Raises ValueError if the comments are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks the comments {BEGIN} and {END}: add them where the table belongs")
    return f"{before}{BEGIN}\n{table(values)}\n{END}{after}"
