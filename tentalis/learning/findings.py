"""Finds what is wrong with a reward from the rewards of some answers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

Rewards = Sequence[Sequence[float | None]]
"""The rewards of the answers of each prompt; None for unknown."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The judgement of a reward. `useless`: nothing can be learned from it; `remarks`: in words.

    `solved`: share of the answers that reach the middle of the range; None if no reward is known.
    """

    answers: int
    solved: float | None
    low: float
    high: float
    useless: bool
    remarks: tuple[str, ...]

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2


def judge_rewards(groups: Rewards, ranged: bool) -> Findings:
    """Judges the rewards of a few answers. `ranged`: the rewards were mapped from a declared range to [-1, 1].

    Otherwise the range is [0, 1], or [-1, 1] if a reward is negative.
    """
    rewards = [reward for group in groups for reward in group if reward is not None]
    answers = sum(len(group) for group in groups)
    low = -1.0 if ranged or any(reward < 0 for reward in rewards) else 0.0
    if not rewards:
        return Findings(answers, None, low, 1.0, True, ("The reward of every answer is unknown.",))
    middle = (low + 1.0) / 2
    solved = sum(reward >= middle for reward in rewards) / len(rewards)
    remarks = []
    constant = min(rewards) == max(rewards)
    if constant:
        remarks.append(
            f"The reward is constant: each of {len(rewards)} answers has {rewards[0]:g}. Nothing can be learned from "
            "it: check the function, or give partial credit."
        )
    elif max(rewards) < middle:
        remarks.append(
            f"No answer reaches {middle:g}, the middle of the range {low:g} to 1: the highest reward of "
            f"{len(rewards)} answers is {max(rewards):g}. Easier prompts or partial credit help a model to begin."
        )
    if unknown := answers - len(rewards):
        remarks.append(f"The reward of {unknown} of {answers} answers is unknown: these are not trained on.")
    flat = [group for group in groups if len(group) > 1 and len({*group}) == 1]
    if flat and not constant:
        remarks.append(
            f"{len(flat)} of {len(groups)} prompts have equal rewards for all of their answers: such a group trains "
            "nothing."
        )
    return Findings(answers, solved, low, 1.0, constant, tuple(remarks))
