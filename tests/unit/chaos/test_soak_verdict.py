"""A soak fails for a leak, for lag, for what stays open, and for nothing else."""

import random
from dataclasses import replace

import pytest

from tests.chaos.verdict import GROWTH_MIB_H, LAG_S, End, Seen, flat_from, growth, reasons

TASKS_S = 75.0


def seen(seconds: int = 1800, leak_b: float = 0.0, lag: float = 40.0, open_growth: float = 0.0) -> Seen:
    """A run as measured: memory finds its size in the first minutes and goes up and down by some MiB, with a batch now
    and then that needs much more. `leak_b`: bytes that each task leaves behind; `open_growth`: tasks per second that
    are never closed."""
    chance = random.Random(1)
    at = [10.0 * look for look in range(seconds // 10)]
    memory = [180 + 40 * min(1.0, moment / 250) + chance.gauss(0, 2) + 60 * (chance.random() < 0.02) for moment in at]
    return Seen(
        at=at,
        memory={"scoring-0": [mib + leak_b * TASKS_S * moment / 2**20 for mib, moment in zip(memory, at, strict=True)]},
        lag={"scoring-0": [max(0.0, chance.gauss(lag, 20)) for _ in at]},
        confirmed={"scoring-0": [400 * moment for moment in at]},
        held={"open_tasks": [chance.gauss(400, 20) + open_growth * moment for moment in at]},
    )


def test_a_steady_run_is_sound() -> None:
    assert reasons(seen(), End(left_open={"open_tasks": 0.0})) == []


@pytest.mark.parametrize("leak_b", [60, 100, 1000])
def test_bytes_that_each_task_leaves_behind_are_seen(leak_b: float) -> None:
    (reason,) = reasons(seen(leak_b=leak_b), End())
    assert reason.startswith("scoring-0: memory grows by ")


def test_a_few_looks_at_a_large_batch_are_no_growth() -> None:
    at = [10.0 * look for look in range(120)]
    memory = [200.0] * 100 + [400.0] * 20
    assert growth(at, memory, 0.0) * 3600 < GROWTH_MIB_H
    assert growth(at, [0.01 * moment for moment in at], 600.0) == pytest.approx(0.01)


def test_growth_is_judged_behind_the_beginnings_of_a_long_run_alone() -> None:
    assert flat_from(seen()) == pytest.approx(1790 / 3)
    assert flat_from(seen(120)) is None
    assert reasons(seen(120, leak_b=10_000, open_growth=10), End()) == []


def test_lag_that_grows_and_lag_at_one_look_are_seen() -> None:
    slow = seen()
    slow.lag["scoring-0"] = [3 * moment for moment in slow.at]  # too slow by a hundredth
    (reason,) = reasons(slow, End())
    assert "scoring-0: 5,370 records behind, 13.4 s" in reason
    once = seen()
    once.lag["scoring-0"][7] = LAG_S * 400 + 100
    assert len(reasons(once, End())) == 1


def test_a_process_that_reads_nothing_has_no_lag_and_is_not_sound() -> None:
    idle = seen(lag=0)
    idle.confirmed["scoring-0"] = [5.0 for _ in idle.at]
    assert reasons(idle, End()) == ["scoring-0: no record confirmed"]


def test_one_task_in_seven_hundred_that_is_never_closed_is_seen() -> None:
    (reason,) = reasons(seen(open_growth=TASKS_S / 700), End())
    assert reason.startswith("open_tasks: ")


@pytest.mark.parametrize(
    ("end", "begins"),
    [
        (End(ended=["join-0 ended with 1"]), "join-0 ended with 1"),
        (End(complaints=["join-0: oh", "join-1: oh"]), "warnings: 2, the first: join-0: oh"),
        (End(lost=["soak-1/0"]), "lost: 1, the first: soak-1/0"),
        (End(left_open={"open_tasks": 0.0, "open_sessions": 3.0}), "open_sessions: 3 left"),
        (End(dead_letters=2.0), "2 dead letters"),
    ],
)
def test_whatever_else_is_wrong_is_a_reason(end: End, begins: str) -> None:
    (reason,) = reasons(seen(), end)
    assert reason.startswith(begins)


def test_a_run_that_was_not_watched_is_not_sound() -> None:
    blind = replace(seen(), unanswered=30)
    (reason,) = reasons(blind, End())
    assert reason.startswith("180 of 210 measurements were answered")
    assert reasons(Seen(), End()) == ["0 of 0 measurements were answered by every process: too few to judge"]
