"""Scorers that a file of scorers names by `module:name`."""

import threading

from schemas.records import Result, Task
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.style_scorer import StyleScorer


def three_quarters(task: Task, result: Result) -> float:
    """Always the same."""
    return 0.75


def hangs(task: Task, result: Result) -> float:
    """Does not come back until it is let go."""
    LET_GO.wait(300)
    return 1.0


async def cannot_say(task: Task, result: Result) -> None:
    """Never knows."""


def a_word(task: Task, result: Result) -> str:
    """Not a number."""
    return WORD


class Nothing:
    """No scorer."""


LET_GO = threading.Event()
WORD = "good"
TASTE = StyleScorer()
RULES = NextStateRules()
