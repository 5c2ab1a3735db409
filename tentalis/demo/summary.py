"""Summary of a run: reward by version, and the first quarter of versions compared with the last."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tentalis.demo.stats import RunStats, VersionScore

RESAMPLES = 99_999


@dataclass(frozen=True, slots=True)
class Quarter:
    """A quarter of the versions (at least one): mean reward, number of samples and of tasks."""

    versions: tuple[int, ...]
    mean: float
    n: int
    tasks: int


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A question with the greedy answers of the base model and the newest adapter."""

    question: str
    base: str
    newest: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a run. `p_value`: chance of so large a difference between equal quarters (see `p_greater`).
    `start_seconds`: until the first task, None if it is not known; `seconds_by_phase`: the medians over the steps."""

    run_id: str
    steps: int
    scores: tuple[VersionScore, ...]
    first: Quarter | None
    last: Quarter | None
    p_value: float | None
    wall_seconds: float
    start_seconds: float | None
    seconds_by_phase: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Returns the object for `-o json`."""
        return {
            "run_id": self.run_id,
            "steps": self.steps,
            "reward_by_version": [asdict(score) for score in self.scores],
            "first_quarter": None if self.first is None else asdict(self.first),
            "last_quarter": None if self.last is None else asdict(self.last),
            "p_value": self.p_value,
            "wall_seconds": round(self.wall_seconds, 1),
            "start_seconds": None if self.start_seconds is None else round(self.start_seconds, 1),
            "seconds_by_phase": {name: round(seconds, 3) for name, seconds in self.seconds_by_phase.items()},
        }

    def times(self) -> dict[str, str]:
        """Returns the times for the table of the report, those that are known."""
        start = {} if self.start_seconds is None else {"seconds until the first task": f"{self.start_seconds:.1f}"}
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds_by_phase.items())
        return start | ({"median time per step": phases} if phases else {})


def p_greater(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the p-value of a one-sided permutation test of means.

    The p-value is the share of permutations with a difference at least as large: of all permutations if they are few,
    else of RESAMPLES random ones (so never below 1e-5). The values may have any distribution but must be independent:
    pass task means, not samples.
    """
    import numpy as np
    from scipy.stats import permutation_test

    def difference(a: Any, b: Any, axis: int) -> Any:
        return np.mean(a, axis=axis) - np.mean(b, axis=axis)

    result = permutation_test(
        (np.asarray(higher), np.asarray(lower)),
        difference,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=10_000,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def summarise(stats: RunStats, steps: int, wall_seconds: float, start_seconds: float | None = None) -> Summary:
    """Returns the summary of the records so far; without quarters if fewer than two versions have rewards."""
    scores = tuple(stats.scores())
    versions = [score.version for score in scores]
    first = last = p_value = None
    if len(versions) >= 2:
        size = max(1, len(versions) // 4)
        first, last = _quarter(stats, versions[:size]), _quarter(stats, versions[-size:])
        if min(first.tasks, last.tasks) > 1:
            p_value = p_greater(stats.task_means(last.versions), stats.task_means(first.versions))
    phases = stats.seconds_by_phase()
    return Summary(stats.run_id, steps, scores, first, last, p_value, wall_seconds, start_seconds, phases)


def _quarter(stats: RunStats, versions: Sequence[int]) -> Quarter:
    rewards = stats.rewards(versions)
    return Quarter(tuple(versions), sum(rewards) / len(rewards), len(rewards), len(stats.task_means(versions)))
