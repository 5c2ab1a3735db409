"""The rewards of two versions side by side, with the difference and its interval; folded from outcomes. Pure.

The unit is the task: the samples of a group share a prompt, so their mean counts once.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from schemas.records import Outcome, OutcomeKind, Record

RESAMPLES = 4_000
_DRAWS = 1_000_000
FEW_TASKS = 10
"""Below this number of tasks on a side, a percentile interval is too narrow to be relied on."""


@dataclass(frozen=True, slots=True)
class ArmRewards:
    """The rewards of one version. `mean`: over tasks, None without any."""

    version: str
    tasks: int
    samples: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class RewardComparison:
    """`difference`: the mean of `one` minus that of `other`; `low` and `high`: its 95% interval. All three are None if
    a side has no rewards."""

    one: ArmRewards
    other: ArmRewards
    difference: float | None
    low: float | None
    high: float | None
    method: str

    def as_json(self) -> dict[str, Any]:
        """The object for `-o json`."""
        return asdict(self)

    @property
    def few(self) -> bool:
        """True if a side has too few tasks for the interval."""
        return min(self.one.tasks, self.other.tasks) < FEW_TASKS


class TaskRewards:
    """The fold over outcomes: the rewards of each task's samples, by the version that sampled them.

    Late halves, superseded results and samples of several versions are left out. `since`: ms; earlier outcomes are left
    out. `environment` and `worker`: only these; None: all.
    """

    def __init__(self, *, since: int | None = None, environment: str | None = None, worker: str | None = None) -> None:
        self._since, self._environment, self._worker = since, environment, worker
        self._rewards: dict[str, dict[str, dict[int, float]]] = {}

    def apply(self, record: Record) -> None:
        """Applies a record of tentalis.outcomes.v1; one that comes twice counts once."""
        if not isinstance(record, Outcome) or record.reward is None:
            return
        versions = {span.policy for span in record.policy_spans}
        if (
            record.kind in (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)
            or len(versions) != 1
            or (self._since is not None and record.event_time < self._since)
            or (self._environment is not None and record.head.environment != self._environment)
            or (self._worker is not None and record.worker_id != self._worker)
        ):
            return
        tasks = self._rewards.setdefault(versions.pop(), {})
        tasks.setdefault(record.head.task_id, {})[record.sample_index] = record.reward

    def versions(self) -> list[str]:
        """The versions that have rewards."""
        return sorted(self._rewards)

    def task_means(self, version: str) -> list[float]:
        """The mean reward of each task that `version` answered, by task id."""
        tasks = self._rewards.get(version, {})
        return [sum(tasks[name].values()) / len(tasks[name]) for name in sorted(tasks)]

    def compare(self, one: str, other: str) -> RewardComparison:
        """Compares two versions (`policy@vN`): the difference of their mean task rewards, with a bootstrap interval."""
        means = [self.task_means(version) for version in (one, other)]
        low, high = interval(*means) if all(means) else (None, None)
        arms = [
            ArmRewards(
                version,
                len(values),
                sum(map(len, self._rewards.get(version, {}).values())),
                float(np.mean(values)) if values else None,
            )
            for version, values in zip((one, other), means, strict=True)
        ]
        difference = float(np.mean(means[0]) - np.mean(means[1])) if all(means) else None
        return RewardComparison(arms[0], arms[1], difference, low, high, METHOD)


METHOD = f"difference of mean task rewards; 95% percentile bootstrap over tasks, {RESAMPLES} resamples, seed 0"


def interval(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of mean(one) - mean(other); the same values give the same interval."""
    generator = np.random.default_rng(0)

    def resampled(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        array = np.asarray(values, dtype=np.float64)
        rows = max(1, _DRAWS // len(array))  # in blocks: a matrix of all resamples would not fit for a long log
        blocks = [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
        return np.concatenate(
            [array[generator.integers(0, len(array), (block, len(array)))].mean(axis=1) for block in blocks]
        )

    low, high = np.percentile(resampled(one) - resampled(other), [2.5, 97.5])
    return float(low), float(high)
