"""Step-wise advantages: each step of an answer against the same step of the group's other answers."""

from collections import defaultdict
from collections.abc import Sequence

from trainer.advantages.graded import EQUAL_STD, Graded, Span, Spans, by_group, moments
from trainer.advantages.group import STD_FLOOR
from trainer.losses.settings import Loss


def stepwise(samples: Sequence[Graded], loss: Loss) -> dict[str, Spans]:
    """Per (group, index of the step): A = (v - mean) / (std + 1e-4) with v = reward + step_weight * score of the step,
    over the samples of the group that are in the batch and got that far (OpenClaw-RL, tracks for agents).

    A sample without scored steps is one step, its whole answer. Tokens outside of steps have no RL part, nor has a step
    that fewer than two samples reached, nor one at which all are equal. (OpenClaw-RL keeps the raw value of a lone
    step; a baseline of nothing is none.) With `requested` 1 there is no group: A = v.
    """
    found: dict[str, list[Span]] = defaultdict(list)
    for members in by_group(samples).values():
        reached: dict[int, list[tuple[str, int, int, float]]] = defaultdict(list)
        for sample in members:
            steps = sample.steps or ((0, sample.n_tokens, 0.0),)
            for index, (start, end, score) in enumerate(steps):
                value = sample.reward + loss.step_weight * score
                if sample.requested == 1:
                    found[sample.rollout_id].append((start, end, value))
                else:
                    reached[index].append((sample.rollout_id, start, end, value))
        for entries in reached.values():
            mean, std = moments([value for *_, value in entries])
            if len(entries) < 2 or std < EQUAL_STD:
                continue
            for rollout_id, start, end, value in entries:
                found[rollout_id].append((start, end, (value - mean) / (std + STD_FLOOR)))
    return {rollout_id: tuple(spans) for rollout_id, spans in found.items()}
