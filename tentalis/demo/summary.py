"""What a finished run has shown: reward by version, the first quarter of versions against the last."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tentalis.demo.stats import Stats, VersionScore

RESAMPLES = 99_999


@dataclass(frozen=True, slots=True)
class Quarter:
    """A quarter of the versions (at least one): how many samples and tasks, and what they earned."""

    versions: tuple[int, ...]
    mean: float
    n: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and what the base model and the newest adapter say to it, greedily."""

    question: str
    base: str
    newest: str


@dataclass(frozen=True, slots=True)
class Summary:
    """`p_value`: how likely so large a difference would be if the quarters did not differ (see `p_greater`)."""

    run_id: str
    steps: int
    scores: tuple[VersionScore, ...]
    first: Quarter | None
    last: Quarter | None
    p_value: float | None
    wall_seconds: float

    def as_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return {
            "run_id": self.run_id,
            "steps": self.steps,
            "reward_by_version": [asdict(score) for score in self.scores],
            "first_quarter": None if self.first is None else asdict(self.first),
            "last_quarter": None if self.last is None else asdict(self.last),
            "p_value": self.p_value,
            "wall_seconds": round(self.wall_seconds, 1),
        }


def p_greater(higher: Sequence[float], lower: Sequence[float]) -> float:
    """One-sided permutation test of means: the share of all ways to deal the values out whose difference is at least as
    large. Exact where there are few ways, else of RESAMPLES random ones (so never below 1e-5). No assumption about the
    distribution of the values; they must be independent, so hand in task means, not samples."""
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


def summarise(stats: Stats, steps: int, wall_seconds: float) -> Summary:
    """The summary of what was seen so far; without quarters where fewer than two versions earned anything."""
    scores = tuple(stats.scores())
    versions = [score.version for score in scores]
    first = last = p_value = None
    if len(versions) >= 2:
        size = max(1, len(versions) // 4)
        first, last = _quarter(stats, versions[:size]), _quarter(stats, versions[-size:])
        if first.tasks + last.tasks > 2:
            p_value = p_greater(stats.task_means(last.versions), stats.task_means(first.versions))
    return Summary(stats.run_id, steps, scores, first, last, p_value, wall_seconds)


def _quarter(stats: Stats, versions: Sequence[int]) -> Quarter:
    rewards = stats.rewards(versions)
    return Quarter(tuple(versions), sum(rewards) / len(rewards), len(rewards), len(stats.task_means(versions)))
