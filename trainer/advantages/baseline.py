"""The running baseline of single answers: the mean reward of earlier steps, from the metrics of the step before.

A conversation has no group to be compared with. Its advantage is the reward less this mean, which never contains the
rewards of its own step. The plan of a step records the mean, so that a replay trains on the same number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

STEP_REWARDS, STEP_ANSWERS = "single_rewards", "single_answers"
"""Metrics of a step: sum of the rewards of its single answers as they are compared (shaped), and their number."""
_REWARDS, _ANSWERS = "baseline_rewards", "baseline_answers"


@dataclass(frozen=True, slots=True)
class RunningBaseline:
    """Sum of rewards and number of answers over all steps so far; a step counts `decay` times as much after each
    further one."""

    rewards: float = 0.0
    answers: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean reward, None before the first answer."""
        return self.rewards / self.answers if self.answers > 0.0 else None

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> "RunningBaseline":
        """Returns the baseline after a step from its metrics; an empty one if they lack it."""
        return cls(metrics.get(_REWARDS, 0.0), metrics.get(_ANSWERS, 0.0))

    @classmethod
    def recorded_in(cls, metrics: Mapping[str, float]) -> bool:
        """True if a step's metrics hold a baseline."""
        return _ANSWERS in metrics

    def after(self, step_metrics: Mapping[str, float], decay: float) -> "RunningBaseline":
        """Returns the baseline after a further step with these metrics.

        >>> RunningBaseline(4.0, 8.0).after({"single_rewards": 3.0, "single_answers": 4.0}, 0.5)
        RunningBaseline(rewards=5.0, answers=8.0)
        """
        return RunningBaseline(
            decay * self.rewards + step_metrics[STEP_REWARDS], decay * self.answers + step_metrics[STEP_ANSWERS]
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics that `of_metrics` reads."""
        return {_REWARDS: self.rewards, _ANSWERS: self.answers}
