"""CISPO: clips the importance weight, never the gradient."""

from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.tokens import LossTokens, Metrics


def cispo(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of -w sg(clip(rho, cispo_low, cispo_high)) A log pi; sg: no gradient through it.

    MiniMax-M1, arXiv 2506.13585: every token keeps its gradient, with a clipped weight. Denominator: the sum of the
    weights over the batch (the paper's is the token mean).

    Example: with bound 4, rho 10, A 1, log pi -2 gives 8, and a gradient of -4.
    """
    ratio = tokens.log_ratio(loss.log_ratio_clamp).detach().exp()
    weight = ratio.clamp(loss.cispo_low, loss.cispo_high)
    per_token = -weight * tokens.advantages * tokens.logprobs
    return (per_token * tokens.weights).sum(), {"clipped": (weight != ratio).float().sum()}
