"""Selects the hints to use from a judge's votes. Pure."""

from collections.abc import Iterable, Sequence
from typing import Literal

Selection = Literal["longest", "all"]

MIN_CHARS = 10
"""A hint has more characters than this (OpenClaw-RL's rule)."""
MAX_HINTS = 3
"""Each hint costs a call to the teacher, and k numbers per token in the rollout."""


def one_line(text: str) -> str:
    """The hint as one line: unprintable characters and runs of white space become one space.

    >>> one_line("  Answer\\nbriefly. ")
    'Answer briefly.'
    """
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def long_enough(hint: str) -> bool:
    """True if a hint, without the white space around it, has more than MIN_CHARS characters."""
    return len(hint.strip()) > MIN_CHARS


def select_hints(hints: Iterable[str], selection: Selection) -> tuple[str, ...]:
    """The hints to use, out of those of the accepting votes, given in the order of the votes.

    `longest`: the one with the most characters, on a tie the first. `all`: each text once, the shortest first (on a tie
    the first vote's), at most MAX_HINTS: the order in which the trainer's top-K losses consider candidates.

    >>> select_hints(["Answer in one sentence.", "Be much briefer.", "Be much briefer."], "all")
    ('Be much briefer.', 'Answer in one sentence.')
    """
    usable: Sequence[str] = [hint for hint in dict.fromkeys(map(one_line, hints)) if long_enough(hint)]
    if selection == "longest":
        return (max(usable, key=len),) if usable else ()
    return tuple(sorted(usable, key=len)[:MAX_HINTS])
