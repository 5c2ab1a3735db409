"""The comparison of two versions by the rewards of their tasks."""

import numpy as np
import pytest

from schemas.records import OutcomeKind, PolicySpan
from tentalis.policies.comparison import TaskRewards, interval
from tests.support.loop_records import T0, outcome, task


def test_the_unit_is_the_task_and_a_repeated_record_counts_once() -> None:
    rewards = TaskRewards()
    for name, version, values in (("a", 1, (0.0, 1.0)), ("b", 1, (1.0, 1.0)), ("c", 2, (0.0, 0.0))):
        for index, reward in enumerate(values):
            for _ in range(2):
                rewards.apply(outcome(task(name), index, version=version, reward=reward))
    assert rewards.task_means("assistant@v1") == [0.5, 1.0]
    found = rewards.compare("assistant@v1", "assistant@v2")
    assert (found.one.tasks, found.one.samples, found.one.mean) == (2, 4, 0.75)
    assert (found.other.tasks, found.other.mean, found.difference) == (1, 0.0, 0.75)
    assert found.low is not None and found.high is not None and 0.5 <= found.low <= 0.75 <= found.high <= 1.0
    assert found.few
    assert found.as_json()["method"].startswith("difference of mean task rewards; 95%")


def test_late_superseded_mixed_and_unrewarded_samples_are_left_out() -> None:
    rewards = TaskRewards()
    mixed = tuple(PolicySpan(start=i, policy=f"assistant@v{i}") for i in (1, 2))
    for left_out in (
        {"kind": OutcomeKind.LATE},
        {"kind": OutcomeKind.SUPERSEDED},
        {"policy_spans": mixed},
        {"reward": None},
    ):
        rewards.apply(outcome(task("a"), **left_out))
    assert rewards.versions() == []
    found = rewards.compare("assistant@v1", "assistant@v2")
    assert (found.difference, found.low, found.high, found.one.mean) == (None, None, None, None)


def test_only_the_asked_for_environment_worker_and_time_count() -> None:
    records = [
        outcome(task("a")),
        outcome(task("b", environment="math")),
        outcome(task("c"), worker_id="w2"),
        outcome(task("d"), event_time=T0 - 1),
    ]
    for conditions, count in (
        ({}, 4),
        ({"environment": "math"}, 1),
        ({"worker": "w2"}, 1),
        ({"since": T0}, 3),
    ):
        rewards = TaskRewards(**conditions)  # type: ignore[arg-type]
        for record in records:
            rewards.apply(record)
        assert len(rewards.task_means("assistant@v1")) == count, conditions


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_the_interval_covers_the_difference_as_often_as_it_says(shift: float) -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        one, other = generator.normal(shift, 1.0, 40), generator.normal(0.0, 1.0, 60)
        low, high = interval(list(one), list(other))
        covered += low <= shift <= high
    assert covered >= 52, "57 of 60 are expected; 52 or fewer have a probability of 2%"


def test_the_same_values_give_the_same_interval() -> None:
    values = [0.1, 0.5, -0.3, 0.9]
    assert interval(values, values[:2]) == interval(values, values[:2])
