"""The clipped surrogate, with asymmetric bounds and dual clip."""

import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.tokens import LossTokens, Metrics


def clipped(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of w max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), and where A < 0 at most
    w c |A|.

    rho = pi / mu against the *sampler's* log-probs, |log rho| clamped to log_ratio_clamp. PPO, arXiv 1707.06347;
    asymmetric bounds: DAPO, arXiv 2503.14476; the bound c = dual_clip: arXiv 1912.09729. Denominator: the sum of the
    weights over the batch (`token_mean`: its RL tokens).

    Example: with clip 0.2 / 0.28, rho 1.5, A 1 gives -1.28; rho 0.5, A -1 gives 0.8; rho 1.5, A -1 gives 1.5; with c 3,
    rho 5, A -1 gives 3.
    """
    ratio = tokens.log_ratio(loss.log_ratio_clamp).exp()
    free = -ratio * tokens.advantages
    bound = -ratio.clamp(1.0 - loss.clip_low, 1.0 + loss.clip_high) * tokens.advantages
    per_token = torch.maximum(free, bound)
    bounded = bound > free
    if loss.dual_clip is not None:
        most = -loss.dual_clip * tokens.advantages
        over = (tokens.advantages < 0) & (per_token > most)
        per_token, bounded = torch.where(over, most, per_token), bounded | over
    return (per_token * tokens.weights).sum(), {"clipped": bounded.detach().float().sum()}
