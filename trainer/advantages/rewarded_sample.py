"""The input of the advantage estimators: a rollout with its reward and the statistics of its group."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schemas.group_statistics import EQUAL_STD
from schemas.records import Rollout
from schemas.tensors import float32_view, uint8_view
from trainer.config.loss import LossConfig

AdvantageSpan = tuple[int, int, float]
"""Tokens [start, end) of a rollout, and their advantage."""
AdvantageSpans = tuple[AdvantageSpan, ...]
Estimator = Callable[[Sequence["RewardedSample"], LossConfig], dict[str, AdvantageSpans]]
"""(rewarded samples of a batch, settings) -> advantages by rollout id; rollouts without an RL part are absent."""


@dataclass(frozen=True, slots=True)
class RewardedSample:
    """A rollout with a known reward.

    `n_rewarded` samples of its group have a known reward, with mean `group_mean` and population standard deviation
    `group_std`; `n_requested` is the group's requested size. Of its `n_tokens` tokens the policy chose `n_answer`.
    `steps` are its scored steps (tokens [start, end) and score). `baseline`: mean reward of earlier single answers.

    Example: RewardedSample("t1/0", "t1", None, None, 1.0, 4, 4, 0.5, 0.5, 30, 12, ())
    """

    rollout_id: str
    group_id: str
    session_id: str | None
    turn_index: int | None
    reward: float
    n_requested: int
    n_rewarded: int
    group_mean: float
    group_std: float
    n_tokens: int
    n_answer: int
    steps: AdvantageSpans
    baseline: float = 0.0

    def uniform_spans(self, advantage: float) -> AdvantageSpans:
        """Returns one advantage for all tokens."""
        return ((0, self.n_tokens, advantage),)


def rewarded_sample(rollout: Rollout) -> RewardedSample | None:
    """Returns the rollout as a sample with a reward; None if its reward is unknown."""
    if rollout.reward is None:
        return None
    scores = float32_view(rollout.step_scores).tolist()
    # Not strict: readers now reject a mismatch as malformed, but earlier runs may have trained on such rollouts.
    return RewardedSample(
        rollout.rollout_id,
        rollout.head.task_id,
        rollout.head.session_id,
        rollout.head.turn_index,
        rollout.reward,
        rollout.n_requested,
        n_rewarded(rollout),
        rollout.reward if rollout.group_mean is None else rollout.group_mean,
        0.0 if rollout.group_std is None else rollout.group_std,
        rollout.n_tokens,
        answer_length(rollout),
        tuple((span.start, span.end, score) for span, score in zip(rollout.step_spans, scores, strict=False)),
    )


def n_rewarded(rollout: Rollout) -> int:
    """Number of samples of its group that closed with a known reward: mean and deviation are over these."""
    return rollout.n_closed if rollout.n_rewarded is None else rollout.n_rewarded


def answer_length(rollout: Rollout) -> int:
    """Number of tokens that the policy chose."""
    return int(uint8_view(rollout.loss_mask).sum())


def by_group(samples: Iterable[RewardedSample]) -> dict[str, list[RewardedSample]]:
    """Returns the samples of each group, in the order of their ids."""
    groups: dict[str, list[RewardedSample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.rollout_id):
        groups[sample.group_id].append(sample)
    return groups


def equal_rewards(requested: int, std: float | None) -> bool:
    """True if all samples of a group got the same reward, for example [1, 1, 1]: none is better than another, so the
    group carries no signal (DAPO, arXiv 2503.14476). False for a conversation: one sample is not a group."""
    return requested > 1 and std is not None and std < EQUAL_STD


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Returns DAPO's punishment of a long answer, <= 0: min(0, -(length - (limit - buffer)) / buffer * factor), at
    least -factor (arXiv 2503.14476, equation 13). Example: limit 20480, buffer 4096, length 18432, factor 1 give
    -0.5."""
    over = (length - (limit - buffer)) / buffer
    return -factor * min(1.0, max(0.0, over))


def count_absent(samples: Iterable[RewardedSample]) -> int:
    """Number of rewarded samples that belong to the groups of `samples` but are not among them."""
    return sum(max(0, members[0].n_rewarded - len(members)) for members in by_group(samples).values())
