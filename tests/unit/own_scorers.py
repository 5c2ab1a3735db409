"""Scorers that a file of scorers names by `module:name`."""

from schemas.records import Result, Task
from tentalis.rewards.taste import Taste


def three_quarters(task: Task, result: Result) -> float:
    """Always the same."""
    return 0.75


async def cannot_say(task: Task, result: Result) -> None:
    """Never knows."""


def a_word(task: Task, result: Result) -> str:
    """Not a number."""
    return WORD


class Nothing:
    """No scorer."""


WORD = "good"
TASTE = Taste()
