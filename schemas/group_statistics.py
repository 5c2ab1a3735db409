"""The statistics of a group's rewards, as rollouts carry them: part of their digest, so the same bits everywhere."""

import math
from collections.abc import Sequence

EQUAL_STD = 1e-6
"""Rewards with a smaller standard deviation count as equal: that of [0.7, 0.7, 0.7] is 1e-16 in floating point."""


def sum_of(values: Sequence[float]) -> float:
    """Returns the sum: float64, added one by one in the given order.

    Not `sum()`: from Python 3.12 on it compensates rounding errors, so the last bit would depend on the interpreter.
    """
    total = 0.0
    for value in values:
        total += value
    return total


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of at least one number, summed by `sum_of`."""
    return sum_of(values) / len(values)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean (`mean_of`) and population standard deviation of at least one number, float64, added one by one
    in the given order.

    >>> mean_and_std([1.0, 0.0, 0.0, 1.0])
    (0.5, 0.5)
    """
    mean = mean_of(values)
    squares = 0.0
    for value in values:
        squares += (value - mean) * (value - mean)
    return mean, math.sqrt(squares / len(values))
