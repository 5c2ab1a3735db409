"""Keys of the keyboard as events of the Chrome DevTools Protocol (its command dispatchKeyEvent). Pure."""

from collections.abc import Iterator
from typing import Any

NAMED = {
    "Enter": ("Enter", 13, "\r"),
    "Tab": ("Tab", 9, ""),
    "Backspace": ("Backspace", 8, ""),
    "Delete": ("Delete", 46, ""),
    "Escape": ("Escape", 27, ""),
    "Space": ("Space", 32, " "),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "PageUp": ("PageUp", 33, ""),
    "PageDown": ("PageDown", 34, ""),
    "Home": ("Home", 36, ""),
    "End": ("End", 35, ""),
}
"""Code, key code and text of the keys with names."""
MODIFIERS = {"Alt": 1, "Control": 2, "Shift": 8}


class UnknownKey(ValueError):
    """A text that names no key; the message has those that are known."""


def pressed(keys: str) -> tuple[dict[str, Any], ...]:
    """Returns the events of a key that is pressed and released, such as `Enter`, `a` or `Control+A`. Raises UnknownKey.

    >>> [event["type"] for event in pressed("Control+A")]
    ['rawKeyDown', 'keyUp']
    """
    *held, key = keys.split("+") if not keys.endswith("+") else [*filter(None, keys[:-1].split("+")), "+"]
    unknown = [name for name in held if name not in MODIFIERS]
    if unknown or (key not in NAMED and len(key) != 1):
        raise UnknownKey(
            f"no key {keys!r}; a key is one character or {', '.join(NAMED)}; before it may stand "
            f"{', '.join(MODIFIERS)}, each with a +"
        )
    bits = sum({MODIFIERS[name] for name in held})
    return _events(key, bits)


def typed(text: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a text that is typed, key by key; a line break is the key Enter."""
    for character in text.replace("\r\n", "\n"):
        yield from _events({"\n": "Enter", "\t": "Tab"}.get(character, character), 0)


def _events(key: str, modifiers: int) -> tuple[dict[str, Any], ...]:
    if key in NAMED:
        code, number, text = NAMED[key]
        name = " " if key == "Space" else key
    else:
        upper = key.upper()
        plain = key.isascii() and key.isalnum()
        code = (f"Digit{key}" if key.isdigit() else f"Key{upper}") if plain else ""
        number, text, name = (ord(upper) if plain else 0), key, key
    if modifiers & (MODIFIERS["Control"] | MODIFIERS["Alt"]):
        text = ""
    shared: dict[str, Any] = {"key": name, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
    down = {"type": "keyDown", "text": text, "unmodifiedText": text} if text else {"type": "rawKeyDown"}
    return shared | down, shared | {"type": "keyUp"}
