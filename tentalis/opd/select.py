"""Which of the hints that a judge's votes gave are used. Pure."""

from collections.abc import Iterable, Sequence
from typing import Literal

Selection = Literal["longest", "all"]

MIN_CHARS = 10
"""A hint has more characters than this (OpenClaw-RL's rule)."""
MAX_HINTS = 3
"""Each costs a call to the teacher, and k numbers per token in the rollout."""


def plain(text: str) -> str:
    """A hint in one line: what cannot be printed, and runs of spaces, become one space each.

    >>> plain("  Answer\\nbriefly. ")
    'Answer briefly.'
    """
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def long_enough(hint: str) -> bool:
    """Whether a hint says something, by its length without the space around it."""
    return len(hint.strip()) > MIN_CHARS


def selected(hints: Iterable[str], how: Selection) -> tuple[str, ...]:
    """The hints to use, of those that votes accepted, in the order of the votes.

    `longest`: the one with the most characters, of equals the first. `all`: each text once, the shortest first (of
    equals the first vote's), at most MAX_HINTS: the order in which the trainer's top-K losses take them for candidates.

    >>> selected(["Answer in one sentence.", "Be much briefer.", "Be much briefer."], "all")
    ('Be much briefer.', 'Answer in one sentence.')
    """
    usable: Sequence[str] = [hint for hint in dict.fromkeys(map(plain, hints)) if long_enough(hint)]
    if how == "longest":
        return (max(usable, key=len),) if usable else ()
    return tuple(sorted(usable, key=len)[:MAX_HINTS])
