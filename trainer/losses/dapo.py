"""DAPO: the clipped surrogate with clip-higher and token mean; its other two parts are about rewards and groups.

arXiv 2503.14476. Dynamic sampling drops the RL part of groups of equal rewards when a batch is planned (offers.py), and
the planner goes on until the batch is full; overlong shaping changes the reward before the advantage.
"""

from torch import Tensor

from trainer.losses.clipped import clipped
from trainer.losses.settings import Loss
from trainer.losses.tokens import Metrics, Tokens


def dapo(tokens: Tokens, loss: Loss) -> tuple[Tensor, Metrics]:
    """Sum over tokens of w max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A): `clipped`, whose default bounds 0.2
    and 0.28 are DAPO's. Denominator: all RL tokens of the batch. No KL term."""
    return clipped(tokens, loss)
