"""The advantages of a whole batch: shapes rewards, compares groups, applies the estimator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from schemas.group_statistics import mean_and_std, mean_of, sum_of
from trainer.advantages.baseline import STEP_ANSWERS, STEP_REWARDS
from trainer.advantages.registry import ESTIMATORS
from trainer.advantages.rewarded_sample import (
    AdvantageSpans,
    RewardedSample,
    by_group,
    count_absent,
    equal_rewards,
    overlong_penalty,
)
from trainer.advantages.session import count_session_gaps
from trainer.config.loss import LossConfig


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """Advantages by rollout id, for rollouts with an RL part. `metrics`: counts of what was missing, and the sums that
    the running baseline needs."""

    by_rollout: dict[str, AdvantageSpans]
    metrics: dict[str, float]


def estimate_advantages(
    samples: Sequence[RewardedSample], loss: LossConfig, baseline: float | None = None
) -> BatchAdvantages:
    """Returns the advantages of all rollouts of a batch whose RL part is planned, from all ranks, in any order.
    `baseline`: of single answers, None if there is none.

    Each rollout carries the statistics of its group, over all samples of it that closed. Where the reward is shaped
    (overlong, mean step score) or compared step by step, the statistics are taken over the samples in this batch
    instead. `group_absent` counts samples of these groups outside the batch, `session_gaps` the turns before which
    credit ends.
    """
    shaped = _shape_rewards(samples, loss)
    compared = shaped if baseline is None else [replace(sample, baseline=baseline) for sample in shaped]
    spans_by_rollout = ESTIMATORS[loss.advantage](compared, loss)
    # Sorted: the same sum for any order of the ranks.
    single = sorted(sample.reward for sample in shaped if sample.n_requested == 1)
    sums = {STEP_ANSWERS: float(len(single)), STEP_REWARDS: sum_of(single)}
    metrics = {"group_absent": 0.0, "session_gaps": 0.0} | sums
    if shaped is not samples or loss.advantage == "stepwise":
        metrics["group_absent"] = float(count_absent(samples))
    if loss.advantage == "gae":
        metrics["session_gaps"] = float(count_session_gaps(samples))
    left_out = {sample.rollout_id for sample in samples if _lacks_signal(sample, loss)}
    return BatchAdvantages(
        {rollout_id: spans for rollout_id, spans in spans_by_rollout.items() if rollout_id not in left_out}, metrics
    )


def is_too_long(n_answer: int, loss: LossConfig) -> bool:
    """True if the RL part of an answer of that many tokens is left out for its length."""
    return loss.overlong.filter and loss.overlong.length is not None and n_answer >= loss.overlong.length


def _lacks_signal(sample: RewardedSample, loss: LossConfig) -> bool:
    equal = loss.drops_equal_rewards and equal_rewards(sample.n_requested, sample.group_std)
    return equal or is_too_long(sample.n_answer, loss)


def _shape_rewards(samples: Sequence[RewardedSample], loss: LossConfig) -> Sequence[RewardedSample]:
    """Returns the samples unchanged if nothing shapes the reward, else new ones with shaped rewards and the groups'
    statistics over them."""
    mean_step_weight = loss.step_weight if not loss.by_steps else 0.0
    penalised = loss.overlong.length is not None and not loss.overlong.filter
    if not mean_step_weight and not penalised:
        return samples
    shaped = []
    for members in by_group(samples).values():
        rewards = [_shaped_reward(sample, mean_step_weight, loss) for sample in members]
        mean, std = mean_and_std(rewards)
        shaped += [
            replace(sample, reward=reward, n_rewarded=len(members), group_mean=mean, group_std=std)
            for sample, reward in zip(members, rewards, strict=True)
        ]
    return shaped


def _shaped_reward(sample: RewardedSample, mean_step_weight: float, loss: LossConfig) -> float:
    reward = sample.reward
    if mean_step_weight and sample.steps:
        reward += mean_step_weight * mean_of([score for *_, score in sample.steps])
    if loss.overlong.length is not None and not loss.overlong.filter:
        reward += overlong_penalty(sample.n_answer, loss.overlong.length, loss.overlong.buffer, loss.overlong.factor)
    return reward
