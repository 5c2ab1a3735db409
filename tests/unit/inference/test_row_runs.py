"""Runs of rows that attend together."""

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.row_runs import _RUN_COST, row_runs


def cost(widths: Sequence[int], runs: Sequence[slice]) -> int:
    return sum(_RUN_COST + len(widths[run]) * max(widths[run]) for run in runs)


def partitions(count: int, start: int = 0) -> Iterator[list[slice]]:
    if start == count:
        yield []
    for end in range(start + 1, count + 1):
        for others in partitions(count, end):
            yield [slice(start, end), *others]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=8))
def test_no_other_runs_cost_less(widths: list[int]) -> None:
    runs = row_runs(widths)
    assert [number for run in runs for number in range(len(widths))[run]] == list(range(len(widths)))
    assert cost(widths, runs) == min(cost(widths, others) for others in partitions(len(widths)))


def test_equal_rows_attend_together_and_a_long_one_apart() -> None:
    assert row_runs([300] * 32) == [slice(0, 32)]
    assert row_runs([64] * 15 + [4000] + [64] * 16) == [slice(0, 15), slice(15, 16), slice(16, 32)]
