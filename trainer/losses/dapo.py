"""DAPO: the clipped surrogate with clip-higher and token mean; DAPO's other two parts concern rewards and groups.

arXiv 2503.14476. Dynamic sampling drops the RL part of groups of equal rewards when a batch is planned (candidates.py),
and the planner continues until the batch is full; overlong shaping changes the reward before the advantage.
"""

from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.clipped import clipped
from trainer.losses.tokens import LossTokens, Metrics


def dapo(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of w max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A): `clipped`, whose default
    bounds 0.2 and 0.28 are DAPO's. Denominator: all RL tokens of the batch. No KL term."""
    return clipped(tokens, loss)
