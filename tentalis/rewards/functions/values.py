"""The value that a reward function returned, read as a reward and its parts. Pure; used in the function's process."""

import math
import reprlib
from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, Literal

from tentalis.rewards.functions.signature import Convention

_MAX_SHOWN = 80
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _MAX_SHOWN
_REWARD_KEYS = ("score", "reward")


Returned = Literal["reward", "text"]
"""The kind of a function's value."""


class BadValue(ValueError):
    """A function returned what is not a reward; the message says what, and what to return."""


@dataclass(frozen=True, slots=True)
class Value:
    """A reward before weights and range, None for unknown, and its named parts."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)


def listed(returned: Any, convention: Convention) -> Any:
    """Returns the list of an iterator that a TRL function returned, such as a generator; other values unchanged.

    Raises whatever the iterator raises: it is code of the function.
    """
    return list(returned) if convention == "trl" and isinstance(returned, Iterator | ValuesView) else returned


def read(returned: Any, convention: Convention) -> Value:
    """Returns the reward in a returned value. Raises BadValue."""
    if convention == "trl":
        returned = _only(returned)
    if returned is None:
        return Value(None)
    if hasattr(returned, "reward") and hasattr(returned, "components"):  # a Verdict
        returned = {"reward": returned.reward, **returned.components}
    if isinstance(returned, Mapping):
        return _of_parts(returned)
    return Value(_number(returned, "it must return a number, a dict of numbers, or None for unknown"))


def read_text(returned: Any, convention: Convention) -> str | None:
    """Returns the text in a returned value, None for none. Raises BadValue."""
    if convention == "trl":
        returned = _only(returned, "texts")
    if returned is None or isinstance(returned, str):
        return returned
    raise BadValue(f"it returned {_shown(returned)}: it must return a text, or None for none")


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among values; texts and other things are left out."""
    found = {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        try:
            found[str(name)] = _number(value, "")
        except BadValue:
            continue
    return found


def _only(returned: Any, kind: str = "rewards") -> Any:
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise BadValue(
            f"it returned {_shown(returned)}: a function of `completions` must return a list with one "
            f"{kind.removesuffix('s')} per completion, each a {'number' if kind == 'rewards' else 'text'} or None"
        )
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if not isinstance(values, list) or len(values) != 1:
        count = len(values) if isinstance(values, list) else 0
        raise BadValue(
            f"it returned {count} {kind} for 1 completion ({_shown(returned)}): it must return one per completion"
        )
    return values[0]


def _of_parts(returned: Mapping[Any, Any]) -> Value:
    for key in _REWARD_KEYS:
        if key in returned:
            reward = returned[key]
            rest = {str(name): value for name, value in returned.items() if name != key}
            if reward is None:
                return Value(None, numbers(rest))
            return Value(_number(reward, f"the part {key!r} is the reward and must be a number or None"), numbers(rest))
    if not returned:
        raise BadValue("it returned an empty dict: return None for an unknown reward")
    parts = {
        str(name): _number(value, f"the part {str(name)!r} must be a number, or name the reward `score`")
        for name, value in returned.items()
        if value is not None
    }
    return Value(math.fsum(parts.values()) if parts else None, parts)


def _number(value: Any, rule: str) -> float:
    """Returns a number of Python, numpy or torch, and a bool as 0 or 1. Raises BadValue."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadValue(f"it returned {_shown(value)}: {rule}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadValue(f"it returned {_shown(value)}: {rule}") from error
    if not math.isfinite(number):
        raise BadValue(f"it returned {number}: a reward must be finite; return None for unknown")
    return number


def _shown(value: Any) -> str:
    try:
        text = _REPR.repr(value)
    except Exception as error:  # noqa: BLE001 - an object of the user's, whose repr may fail in any way
        text = f"an object whose repr fails ({type(error).__name__})"
    text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
    return f"{text} ({type(value).__name__})"
