"""Count, mean and variance, mergeable from parts in any order and without the samples.

Not for the statistics of a group (`schemas.group_statistics`): the last bits differ.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.records import MetaSignal


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of real numbers."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, value: float) -> "Moments":
        """Returns the moments with one more value (Welford 1962)."""
        n = self.n + 1
        delta = value - self.mean
        mean = self.mean + delta / n
        return Moments(n, mean, self.m2 + delta * (value - mean))

    def merge(self, other: "Moments") -> "Moments":
        """Returns the moments of both samples together (Chan, Golub, LeVeque 1979)."""
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        return Moments(n, self.mean + delta * other.n / n, self.m2 + other.m2 + delta * delta * self.n * other.n / n)

    @property
    def variance(self) -> float | None:
        """Population variance; None without values."""
        return self.m2 / self.n if self.n else None

    @classmethod
    def of(cls, n: int, mean: float | None, variance: float | None) -> "Moments":
        """Returns the moments with the values of a MetaSignal; a missing variance counts as 0."""
        return cls(n, mean or 0.0, (variance or 0.0) * n)


def combine(signals: Iterable[MetaSignal]) -> MetaSignal:
    """Combines the buckets of one manager and worker into one signal, over inputs, partitions, windows, environments.

    The newest signal of each Kafka key (manager/worker/environment/window/partition/input) is a bucket: keep only
    these, then combine any of them. Raises ValueError without signals, or for several managers or workers.
    """
    parts = sorted(signals, key=lambda signal: (signal.window_start, signal.event_time))
    who = {(part.manager_id, part.worker_id) for part in parts}
    if len(who) != 1:
        raise ValueError(f"signals must be of one manager and worker, but these are of {sorted(who) or 'none'}")
    reward, outcomes, grades = Moments(), Counter[str](), Moments()
    for part in parts:
        reward = reward.merge(Moments.of(part.count, part.mean_reward, part.reward_variance))
        grades = grades.merge(Moments.of(part.feedback_count, part.mean_feedback_score, part.feedback_variance))
        outcomes.update(part.outcomes)
    start = parts[0].window_start
    environments = {part.environment for part in parts}
    return parts[0].model_copy(
        update={
            "event_time": max(part.event_time for part in parts),
            "window_ms": max(part.window_start + part.window_ms for part in parts) - start,
            "count": reward.n,
            "mean_reward": reward.mean if reward.n else None,
            "reward_variance": reward.variance,
            "outcomes": dict(sorted(outcomes.items())),
            "feedback_count": grades.n,
            "mean_feedback_score": grades.mean if grades.n else None,
            "feedback_variance": grades.variance,
            "environment": environments.pop() if len(environments) == 1 else "",
        }
    )
