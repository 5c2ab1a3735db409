"""The advantages of a whole batch: rewards shaped, groups compared, estimators applied."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.advantages.graded import Graded, Spans, absent, by_group, equal_rewards, moments, overlong
from trainer.advantages.registry import ESTIMATORS
from trainer.advantages.session import gaps
from trainer.losses.settings import Loss


@dataclass(frozen=True, slots=True)
class Advantages:
    """By rollout id, for those with an RL part; and what was missing, for the step's metrics."""

    of: dict[str, Spans]
    metrics: dict[str, float]


def advantages_of(samples: Sequence[Graded], loss: Loss) -> Advantages:
    """The advantages of all rollouts of a batch whose RL part is planned, from all ranks, in any order.

    The statistics of a group come with each of its rollouts, over all its samples that closed. Where the reward is
    shaped (overlong, mean step score) or compared step by step, they are taken over the samples in this batch instead;
    `group_absent` counts those that are elsewhere, `session_gaps` the turns before which credit ends.
    """
    shaped = _shaped(samples, loss)
    found = ESTIMATORS[loss.advantage](shaped, loss)
    metrics = {"group_absent": 0.0, "session_gaps": 0.0}
    if shaped is not samples or loss.advantage == "stepwise":
        metrics["group_absent"] = float(absent(samples))
    if loss.advantage == "gae":
        metrics["session_gaps"] = float(gaps(samples))
    left_out = {sample.rollout_id for sample in samples if _says_nothing(sample, loss)}
    return Advantages({name: spans for name, spans in found.items() if name not in left_out}, metrics)


def too_long(n_answer: int, loss: Loss) -> bool:
    """Whether the RL part of an answer of that many tokens is left out for its length."""
    return loss.overlong.filter and loss.overlong.length is not None and n_answer >= loss.overlong.length


def _says_nothing(sample: Graded, loss: Loss) -> bool:
    equal = loss.drops_equal_rewards and equal_rewards(sample.requested, sample.std)
    return equal or too_long(sample.n_answer, loss)


def _shaped(samples: Sequence[Graded], loss: Loss) -> Sequence[Graded]:
    """The same samples where nothing shapes the reward, else new ones with the groups' statistics over them."""
    by_mean_step = loss.step_weight if not loss.by_steps else 0.0
    punished = loss.overlong.length is not None and not loss.overlong.filter
    if not by_mean_step and not punished:
        return samples
    found = []
    for members in by_group(samples).values():
        rewards = [_reward(sample, by_mean_step, loss) for sample in members]
        mean, std = moments(rewards)
        found += [
            replace(sample, reward=reward, n=len(members), mean=mean, std=std)
            for sample, reward in zip(members, rewards, strict=True)
        ]
    return found


def _reward(sample: Graded, by_mean_step: float, loss: Loss) -> float:
    reward = sample.reward
    if by_mean_step and sample.steps:
        reward += by_mean_step * moments([score for *_, score in sample.steps])[0]
    if loss.overlong.length is not None and not loss.overlong.filter:
        reward += overlong(sample.n_answer, loss.overlong.length, loss.overlong.buffer, loss.overlong.factor)
    return reward
