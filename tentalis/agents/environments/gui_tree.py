"""The text that the policy sees of a page: its accessibility tree, one line per element. Pure.

An element that can be acted on has a number in brackets, which it keeps as long as it is on the page. Texts of the page
are quoted on one line, so that a page cannot write a line of the tree or a turn of the chat.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tentalis.text.tool_output import head_and_tail, readable_text

SHOWN_CHARACTERS = 8000
"""Characters of a page that the policy sees: its head and tail."""
TEXT_CHARACTERS = 300
"""Characters of one text of a page that are shown."""
MOST_NODES = 5000
"""Nodes of a page that are looked at."""
_DEEPEST = 20
_ACTIVE = frozenset(
    (
        *("button", "link", "textbox", "searchbox", "combobox", "listbox", "option", "checkbox", "radio", "switch"),
        *("slider", "spinbutton", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "treeitem"),
        *("Date", "DateTime", "InputTime", "ColorWell"),
    )
)
_PASSED = frozenset(
    ("generic", "none", "presentation", "Section", "MenuListPopup", "LayoutTable", "LayoutTableRow", "LayoutTableCell")
)
_HIDDEN = frozenset(("InlineTextBox", "LineBreak", "ListMarker", "RubyAnnotation"))
_STATES = ("checked", "pressed", "selected", "expanded", "disabled", "required", "readonly", "focused")
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"<(?=/?tool_)")


class ElementNumbers:
    """The numbers of the elements of a page, in the order in which they were first shown."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._next = 1

    def number(self, node: int) -> int:
        """Returns the number of a node of the document (its backend id)."""
        if node not in self._numbers:
            self._numbers[node], self._nodes[self._next] = self._next, node
            self._next += 1
        return self._numbers[node]

    def node(self, number: int) -> int | None:
        """Returns the node with a number, or None."""
        return self._nodes.get(number)

    def forget(self) -> None:
        """Forgets all nodes, when another document is shown. Their numbers are not given again."""
        self._numbers.clear()
        self._nodes.clear()


@dataclass(frozen=True, slots=True)
class _Line:
    depth: int
    text: str
    empty: bool


def page_text(
    nodes: Iterable[Mapping[str, Any]], clickable: Mapping[int, str], numbers: ElementNumbers, where: str
) -> str:
    """Returns the accessibility tree of a page as text.

    Args:
        nodes: as the protocol's command getFullAXTree returns them.
        clickable: the tag names of the nodes that react to clicks, by backend id.
        numbers: those of earlier texts of the page; new elements get the next ones.
        where: the address of the page, as the policy knows it.
    """
    found = {str(node["nodeId"]): node for node in nodes}
    root = next((node for node in found.values() if node.get("parentId") not in found), None)
    lines: list[_Line] = []
    waiting: list[tuple[str, int, str]] = [] if root is None else [(str(root["nodeId"]), 0, "")]
    seen = 0
    while waiting and seen < MOST_NODES:
        name, depth, said = waiting.pop()
        node = found.get(name)
        if node is None:
            continue
        seen += 1
        line = _line(node, depth, said, clickable, numbers, where)
        if line is not None:
            lines.append(line)
        if _value(node, "role") in _HIDDEN:
            continue
        inside = (depth if line is None else depth + 1, said if line is None else _value(node, "name"))
        waiting += [(str(child), *inside) for child in reversed(node.get("childIds", ()))]
    shown = [f"{'  ' * min(line.depth, _DEEPEST)}{line.text}" for line in _without_empty(lines)]
    if waiting:
        shown.append(f"[the page has more than {MOST_NODES} elements; the rest is not shown]")
    return head_and_tail("\n".join(shown) or "[the page is empty]", SHOWN_CHARACTERS)


def quoted(text: str) -> str:
    """Returns a text of a page in quotation marks on one line, without control characters, special tokens and tags of
    tool calls.

    >>> quoted('Log\\n in <|im_end|></tool_response>')
    '"Log in < |im_end|>< /tool_response>"'
    """
    plain = _SPACE.sub(" ", readable_text(text.encode("utf-8", errors="replace"))).strip()
    return json.dumps(_TAG.sub("< ", head_and_tail(plain, TEXT_CHARACTERS).replace("\n", " ")), ensure_ascii=False)


def _line(
    node: Mapping[str, Any],
    depth: int,
    said: str,
    clickable: Mapping[int, str],
    numbers: ElementNumbers,
    where: str,
) -> _Line | None:
    """Returns the line of a node, None if only its children are shown. `said`: the name of the element around it."""
    role, name, backend = _value(node, "role"), _value(node, "name"), node.get("backendDOMNodeId")
    if role in ("RootWebArea", "WebArea"):
        return _Line(depth, f"page {quoted(name)} at {where}", False)
    if role in _HIDDEN:
        return None
    if role == "StaticText":
        return None if not name.strip() or name.strip() == said.strip() else _Line(depth, f"text {quoted(name)}", False)
    tag = clickable.get(backend) if isinstance(backend, int) else None
    hidden = bool(node.get("ignored")) or role in _PASSED
    active = not node.get("ignored") and (role in _ACTIVE or _property(node, "focusable") is True)
    if hidden and not active and tag is None:
        return None
    label = f"clickable {tag.lower()}" if hidden and tag is not None else role
    parts = [label if not isinstance(backend, int) or not (active or tag) else f"[{numbers.number(backend)}] {label}"]
    if name.strip():
        parts.append(quoted(name))
    value = _value(node, "value")
    if value and value != name and role not in ("RootWebArea", "option"):
        parts.append(f"value {quoted(value)}")
    states = _states(node)
    if states:
        parts.append(f"({', '.join(states)})")
    return _Line(depth, " ".join(parts), not (active or tag or name.strip() or value or states))


def _without_empty(lines: list[_Line]) -> list[_Line]:
    """Returns the lines without those of parts of the page that hold nothing."""
    kept: list[_Line] = []
    for line in reversed(lines):
        if not line.empty or (kept and kept[-1].depth > line.depth):
            kept.append(line)
    return kept[::-1]


def _states(node: Mapping[str, Any]) -> list[str]:
    found = []
    for name in _STATES:
        value = _property(node, name)
        if value in (True, "true", "mixed"):
            found.append("partly checked" if value == "mixed" else name)
        elif name == "expanded" and value is False:
            found.append("collapsed")
    return found


def _property(node: Mapping[str, Any], name: str) -> object:
    return next((each["value"].get("value") for each in node.get("properties", ()) if each["name"] == name), None)


def _value(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key, {}).get("value", "")
    return value if isinstance(value, str) else json.dumps(value)
