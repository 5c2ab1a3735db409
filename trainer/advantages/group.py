"""Advantages of one number per rollout: the reward, or its difference to the group's other samples.

With `requested` 1 (a conversation has no group) all but `binary` are the reward itself. A group of more than one
requested sample of which fewer than two have a reward says nothing: over one sample the mean is the reward.
"""

from collections.abc import Callable, Sequence

from trainer.advantages.graded import Estimator, Graded, Spans
from trainer.losses.settings import Loss

STD_FLOOR = 1e-4


def _compared(difference: Callable[[Graded], float]) -> Estimator:
    def estimate(samples: Sequence[Graded], loss: Loss) -> dict[str, Spans]:
        found = {}
        for sample in samples:
            if sample.requested == 1:
                found[sample.rollout_id] = sample.everywhere(sample.reward)
            elif sample.n >= 2:
                found[sample.rollout_id] = sample.everywhere(difference(sample))
        return found

    return estimate


group_mean = _compared(lambda sample: sample.reward - sample.mean)
"""A = r - mean. Rewards [1, 0, 0, 1] give 0.5, -0.5, -0.5, 0.5. As `dr_grpo` (arXiv 2503.20783) together with the
constant denominator `sequence_sum`: then neither length nor difficulty weighs."""

group_mean_std = _compared(lambda sample: (sample.reward - sample.mean) / (sample.std + STD_FLOOR))
"""A = (r - mean) / (std + 1e-4), the population's standard deviation (GRPO, arXiv 2402.03300). [1, 0, 0, 1] gives
almost 1, -1, -1, 1. It weighs groups of nearly equal rewards up."""

leave_one_out = _compared(lambda sample: (sample.reward - sample.mean) * sample.n / (sample.n - 1))
"""A = r - mean of the *others* = (r - mean) n / (n - 1) (RLOO, arXiv 2402.14740). [1, 0, 0, 1] gives 2/3, -2/3, ..."""


def reward(samples: Sequence[Graded], loss: Loss) -> dict[str, Spans]:
    """A = r, whatever the group."""
    return {sample.rollout_id: sample.everywhere(sample.reward) for sample in samples}


def binary(samples: Sequence[Graded], loss: Loss) -> dict[str, Spans]:
    """A = r for every token, and no RL part (no count either) where r = 0, the judge's "cannot say" (OpenClaw-RL's
    binary RL; rewards of judges are -1, 0 and 1)."""
    return {sample.rollout_id: sample.everywhere(sample.reward) for sample in samples if sample.reward != 0.0}
