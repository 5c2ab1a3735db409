"""Shortens long lists for people."""

from collections.abc import Sequence


def shortened(lines: Sequence[str], most: int = 5) -> list[str]:
    """Returns the first `most` lines and a count of the rest, so that many bad records do not hide the result.

    JSON output is not shortened.

    >>> shortened(["a", "b", "c"], most=2)
    ['a', 'b', 'and 1 more (-o json lists them)']
    """
    left = len(lines) - most
    return [*lines[:most], f"and {left} more (-o json lists them)"] if left > 0 else list(lines)
