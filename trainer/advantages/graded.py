"""A rollout as the estimators of advantages see it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schemas.records import Rollout
from schemas.tensors import float32_view, uint8_view
from trainer.losses.settings import Loss

EQUAL_STD = 1e-6
"""Rewards with a smaller standard deviation are equal: that of [0.7, 0.7, 0.7] is 1e-16 in floating point."""

Span = tuple[int, int, float]
"""Tokens [start, end) of a rollout and their advantage."""
Spans = tuple[Span, ...]
Estimator = Callable[[Sequence["Graded"], Loss], dict[str, Spans]]
"""(the graded rollouts of a batch, settings) -> the advantages of those that have any, by rollout id."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A rollout with a known reward.

    `n` samples of its group have a known reward, with `mean` and population standard deviation `std`; `requested` is
    the group's requested size. `n_tokens` is its length, `n_answer` of them the policy chose. `steps` are its scored
    steps (tokens [start, end) and score).

    Example: Graded("t1/0", "t1", None, None, 1.0, 4, 4, 0.5, 0.5, 30, 12, ())
    """

    rollout_id: str
    group: str
    session: str | None
    turn: int | None
    reward: float
    requested: int
    n: int
    mean: float
    std: float
    n_tokens: int
    n_answer: int
    steps: Spans

    def everywhere(self, advantage: float) -> Spans:
        """One advantage for all tokens."""
        return ((0, self.n_tokens, advantage),)


def graded(rollout: Rollout) -> Graded | None:
    """What a rollout says of its reward; None without one."""
    if rollout.reward is None:
        return None
    scores = float32_view(rollout.step_scores).tolist()
    # Not strict: what does not fit is refused where rollouts are read, but runs of before may have trained on it.
    return Graded(
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
    """Samples of its group that closed with a known reward: those that mean and deviation are over."""
    return rollout.n_closed if rollout.n_rewarded is None else rollout.n_rewarded


def answer_length(rollout: Rollout) -> int:
    """Tokens that the policy chose."""
    return int(uint8_view(rollout.loss_mask).sum())


def by_group(samples: Iterable[Graded]) -> dict[str, list[Graded]]:
    """The samples of each group, in the order of their ids."""
    groups: dict[str, list[Graded]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.rollout_id):
        groups[sample.group].append(sample)
    return groups


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation of at least one number, float64, added up in the order given."""
    total = 0.0
    for value in values:
        total += value
    mean = total / len(values)
    squares = 0.0
    for value in values:
        squares += (value - mean) * (value - mean)
    return mean, math.sqrt(squares / len(values))


def equal_rewards(requested: int, std: float | None) -> bool:
    """Whether the samples of a group all got the same reward, so that none is better than another: rewards [1, 1, 1].
    Such a group says nothing (DAPO, arXiv 2503.14476). A conversation (one sample) is no group."""
    return requested > 1 and std is not None and std < EQUAL_STD


def overlong(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's punishment of a long answer, <= 0: min(0, -(length - (limit - buffer)) / buffer * factor), no less than
    -factor (arXiv 2503.14476, equation 13). Limit 20480, buffer 4096, length 18432, factor 1 give -0.5."""
    over = (length - (limit - buffer)) / buffer
    return -factor * min(1.0, max(0.0, over))


def absent(samples: Iterable[Graded]) -> int:
    """Samples with a reward that belong to the groups of these and are not among them."""
    return sum(max(0, members[0].n - len(members)) for members in by_group(samples).values())
