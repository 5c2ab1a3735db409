"""Step-wise advantages: compares each step of an answer with the same step of the group's other answers."""

from collections import defaultdict
from collections.abc import Sequence

from schemas.group_statistics import EQUAL_STD, mean_and_std
from trainer.advantages.group import STD_FLOOR
from trainer.advantages.rewarded_sample import (
    AdvantageSpan,
    AdvantageSpans,
    RewardedSample,
    by_group,
)
from trainer.config.loss import LossConfig


def stepwise(samples: Sequence[RewardedSample], loss: LossConfig) -> dict[str, AdvantageSpans]:
    """Per (group, index of the step): A = (v - mean) / (std + 1e-4) with v = reward + step_weight * score of the step,
    over the samples of the group that are in the batch and reached that step (OpenClaw-RL, tracks for agents).

    A sample without scored steps is one step, its whole answer. Tokens outside of steps have no RL part; neither has a
    step that fewer than two samples reached, nor one at which all values are equal. (OpenClaw-RL keeps the raw value of
    a lone step, but without other samples there is no baseline.) With `n_requested` 1 there is no group: A = v.
    """
    spans_by_rollout: dict[str, list[AdvantageSpan]] = defaultdict(list)
    for members in by_group(samples).values():
        values_by_step: dict[int, list[tuple[str, int, int, float]]] = defaultdict(list)
        for sample in members:
            steps = sample.steps or ((0, sample.n_tokens, 0.0),)
            for index, (start, end, score) in enumerate(steps):
                value = sample.reward + loss.step_weight * score
                if sample.n_requested == 1:
                    spans_by_rollout[sample.rollout_id].append((start, end, value))
                else:
                    values_by_step[index].append((sample.rollout_id, start, end, value))
        for entries in values_by_step.values():
            mean, std = mean_and_std([value for *_, value in entries])
            if len(entries) < 2 or std < EQUAL_STD:
                continue
            for rollout_id, start, end, value in entries:
                spans_by_rollout[rollout_id].append((start, end, (value - mean) / (std + STD_FLOOR)))
    return {rollout_id: tuple(spans) for rollout_id, spans in spans_by_rollout.items()}
