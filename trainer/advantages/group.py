"""Advantages of one number per rollout: the reward, or its difference to the group's other samples.

With `n_requested` 1 (a conversation has no group) the estimators of groups return the reward less the running baseline
(baseline.py), without one the reward itself. A group of more than one requested sample of which fewer than two have a
reward gives no advantage: over one sample the mean is the reward.
"""

from collections.abc import Callable, Sequence

from schemas.group_statistics import EQUAL_STD
from trainer.advantages.rewarded_sample import AdvantageSpans, Estimator, RewardedSample
from trainer.config.loss import LossConfig

STD_FLOOR = 1e-4


def _group_estimator(difference: Callable[[RewardedSample], float]) -> Estimator:
    def estimate(samples: Sequence[RewardedSample], loss: LossConfig) -> dict[str, AdvantageSpans]:
        spans_by_rollout = {}
        for sample in samples:
            if sample.n_requested == 1:
                advantage = sample.reward - sample.baseline
                exact = 0.0 if sample.baseline and abs(advantage) < EQUAL_STD else advantage
                spans_by_rollout[sample.rollout_id] = sample.uniform_spans(exact)
            elif sample.n_rewarded >= 2:
                # Exactly 0 for equal rewards: a rounding error would cost them a forward and a backward pass.
                advantage = 0.0 if sample.group_std < EQUAL_STD else difference(sample)
                spans_by_rollout[sample.rollout_id] = sample.uniform_spans(advantage)
        return spans_by_rollout

    return estimate


group_mean = _group_estimator(lambda sample: sample.reward - sample.group_mean)
"""A = r - mean. Rewards [1, 0, 0, 1] give 0.5, -0.5, -0.5, 0.5. As `dr_grpo` (arXiv 2503.20783) it is used with the
constant denominator `sequence_sum`: then neither length nor difficulty changes the weight."""

group_mean_std = _group_estimator(lambda sample: (sample.reward - sample.group_mean) / (sample.group_std + STD_FLOOR))
"""A = (r - mean) / (std + 1e-4), with the population's standard deviation (GRPO, arXiv 2402.03300). [1, 0, 0, 1] gives
almost 1, -1, -1, 1. Groups of nearly equal rewards get more weight."""

leave_one_out = _group_estimator(
    lambda sample: (sample.reward - sample.group_mean) * sample.n_rewarded / (sample.n_rewarded - 1)
)
"""A = r - mean of the *others* = (r - mean) n / (n - 1) (RLOO, arXiv 2402.14740). [1, 0, 0, 1] gives 2/3, -2/3, ..."""


def reward(samples: Sequence[RewardedSample], loss: LossConfig) -> dict[str, AdvantageSpans]:
    """A = r, independent of the group."""
    return {sample.rollout_id: sample.uniform_spans(sample.reward) for sample in samples}


def binary(samples: Sequence[RewardedSample], loss: LossConfig) -> dict[str, AdvantageSpans]:
    """A = r for every token. No RL part (and no count) where r = 0, the judge's "cannot say" (OpenClaw-RL's binary RL;
    rewards of judges are -1, 0 and 1)."""
    return {sample.rollout_id: sample.uniform_spans(sample.reward) for sample in samples if sample.reward != 0.0}
