"""The actions of the policy on a page: click, type, press, scroll and navigate, as tools that it calls.

Elements are clicked and typed into as with mouse and keyboard, so what covers an element gets the click. Options of a
list and fields without keys, such as dates, are set.
"""

from collections.abc import Mapping
from typing import Any

from tentalis.agents.environments.gui_browser import HEIGHT, WIDTH, GuiBrowser
from tentalis.agents.environments.gui_devtools import DevToolsError
from tentalis.agents.environments.gui_keys import UnknownKey, pressed, typed
from tentalis.agents.environments.gui_tree import ElementNumbers
from tentalis.agents.environments.tools import signature

DONE, NAVIGATE = "done", "navigate"
LONGEST_TEXT = 1000
"""Characters of a text that is typed."""
_SCROLLED = 400
_DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_REF = {"type": "integer", "description": "The number of the element in brackets."}
_STRING = {"type": "string"}


def _schema(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


PARAMETERS: dict[str, dict[str, Any]] = {
    "click": _schema({"ref": _REF}),
    "type": _schema({"ref": _REF, "text": {"type": "string", "maxLength": LONGEST_TEXT}}),
    "press": _schema({"keys": _STRING}),
    "scroll": _schema({"direction": {"type": "string", "enum": list(_DIRECTIONS)}}, {"ref": _REF}),
    NAVIGATE: _schema({"url": _STRING}),
    DONE: _schema({}, {"answer": _STRING}),
}
"""The JSON schemas of the arguments of each tool."""
_DESCRIPTIONS = {
    "click": "Clicks an element; of a list of options, chooses the option.",
    "type": "Replaces the text of a field by typing, key by key. A line break is the key Enter. A date is YYYY-MM-DD.",
    "press": "Presses a key where the cursor is, such as Enter, Tab, ArrowDown, a or Control+A.",
    "scroll": "Scrolls the page, or the element with the number.",
    NAVIGATE: "Shows another page of the task by its address.",
    DONE: "Ends the task, with the answer if it asks for one.",
}
_CHOOSE = """function () {
  const list = this.tagName === 'OPTION' ? this.closest('select') : null;
  if (!list) return 'no option';
  if (list.disabled || this.disabled) return 'disabled';
  this.selected = list.multiple ? !this.selected : true;
  for (const kind of ['input', 'change']) list.dispatchEvent(new Event(kind, {bubbles: true}));
  return 'chosen';
}"""
_FIELD = """function (text) {
  const kind = this.tagName === 'INPUT' ? this.type : this.tagName === 'TEXTAREA' ? 'text' : '';
  if (this.disabled || this.readOnly) return 'no field';
  if (['date', 'time', 'month', 'week', 'datetime-local', 'color', 'range'].includes(kind)) {
    this.focus();
    this.value = text;
    for (const event of ['input', 'change']) this.dispatchEvent(new Event(event, {bubbles: true}));
    return this.value === text ? 'set' : 'not set: ' + kind;
  }
  if (['', 'button', 'submit', 'reset', 'image', 'checkbox', 'radio', 'file', 'hidden'].includes(kind)) {
    if (!this.isContentEditable) return 'no field';
    this.focus();
    document.getSelection().selectAllChildren(this);
    return 'ready';
  }
  this.focus();
  this.select();
  return 'ready';
}"""
_SCROLL = """function (x, y) {
  let each = this;
  const room = e => x ? e.scrollWidth > e.clientWidth : e.scrollHeight > e.clientHeight;
  while (each && !(each.nodeType === 1 && room(each) && getComputedStyle(each).overflow !== 'visible'))
    each = each.parentNode;
  (each || window).scrollBy(x, y);
}"""


class ActionRefused(Exception):
    """An action that cannot be carried out; the message says why, for the policy."""


def signatures(*, navigate: bool) -> list[dict[str, Any]]:
    """Returns the tools as prompts list them. `navigate`: the task has more than one page."""
    names = [name for name in PARAMETERS if navigate or name != NAVIGATE]
    return [signature(name, _DESCRIPTIONS[name], PARAMETERS[name]) for name in names]


async def act(browser: GuiBrowser, numbers: ElementNumbers, name: str, arguments: Mapping[str, Any]) -> str:
    """Carries an action out and returns what was done, for the policy.

    Args:
        numbers: those of the elements that the policy was shown.
        name: of a tool other than `done`.
        arguments: fit the tool's schema.

    Raises:
        ActionRefused: it cannot be carried out on this page.
        BrowserGone, PageCrashed, TimeoutError: see DevTools.call.
    """
    node = _node(numbers, arguments["ref"]) if "ref" in arguments else None
    try:
        if name == NAVIGATE:
            await _navigate(browser, arguments["url"])
        elif name == "press":
            await _press(browser, arguments["keys"])
        elif name == "scroll":
            await _scroll(browser, node, arguments["direction"])
        elif name == "type":
            assert node is not None
            await _type(browser, node, arguments["text"])
        else:
            assert name == "click" and node is not None
            await _click(browser, node)
    except DevToolsError as error:
        raise ActionRefused(f"the page cannot do that: {error}") from error
    await browser.settle()
    return "done"


def _node(numbers: ElementNumbers, ref: int) -> int:
    node = numbers.node(ref)
    if node is None:
        raise ActionRefused(f"there is no element [{ref}] on the page")
    return node


async def _click(browser: GuiBrowser, node: int) -> None:
    chosen = await browser.on_node(node, _CHOOSE)
    if chosen == "disabled":
        raise ActionRefused("the option cannot be chosen: it is disabled")
    if chosen == "chosen":
        return
    x, y = await _point(browser, node)
    await browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    for kind in ("mousePressed", "mouseReleased"):
        await browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


async def _point(browser: GuiBrowser, node: int) -> tuple[float, float]:
    """Returns the middle of the visible part of an element, in pixels of the window."""
    await browser.call("DOM.scrollIntoViewIfNeeded", backendNodeId=node)
    for quad in (await browser.call("DOM.getContentQuads", backendNodeId=node))["quads"]:
        left, right = max(min(quad[::2]), 0.0), min(max(quad[::2]), float(WIDTH))
        top, bottom = max(min(quad[1::2]), 0.0), min(max(quad[1::2]), float(HEIGHT))
        if left < right and top < bottom:
            return (left + right) / 2, (top + bottom) / 2
    raise ActionRefused("the element is not visible")


async def _type(browser: GuiBrowser, node: int, text: str) -> None:
    found = await browser.on_node(node, _FIELD, text)
    if found == "no field":
        raise ActionRefused("the element takes no text")
    if str(found).startswith("not set"):
        raise ActionRefused(f"the field takes no such text; its type is {str(found).rpartition(' ')[2]}")
    if found == "ready":
        for event in typed(text) if text else pressed("Delete"):
            await browser.call("Input.dispatchKeyEvent", **event)


async def _press(browser: GuiBrowser, keys: str) -> None:
    try:
        events = pressed(keys)
    except UnknownKey as error:
        raise ActionRefused(str(error)) from error
    for event in events:
        await browser.call("Input.dispatchKeyEvent", **event)


async def _scroll(browser: GuiBrowser, node: int | None, direction: str) -> None:
    x, y = (_SCROLLED * part for part in _DIRECTIONS[direction])
    if node is None:
        await browser.evaluate(f"window.scrollBy({x}, {y})")
    else:
        await browser.on_node(node, _SCROLL, x, y)


async def _navigate(browser: GuiBrowser, url: str) -> None:
    target = browser.pages.allowed(url, browser.url)
    if target is None:
        raise ActionRefused("this is not a page of the task")
    await browser.open(target)
