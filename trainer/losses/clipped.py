"""The clipped surrogate, with asymmetric bounds and dual clip."""

import torch
from torch import Tensor

from trainer.losses.settings import Loss
from trainer.losses.tokens import Metrics, Tokens


def clipped(tokens: Tokens, loss: Loss) -> tuple[Tensor, Metrics]:
    """Sum over tokens of w max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), and where A < 0 at most w c |A|.

    rho = pi / mu against the *sampler's* log-probs, |log rho| cut at log_ratio_clamp. PPO, arXiv 1707.06347; bounds
    that differ: DAPO, arXiv 2503.14476; the bound c = dual_clip: arXiv 1912.09729. Denominator: the sum of the weights
    over the batch (`token_mean`: its RL tokens).

    With clip 0.2 / 0.28: rho 1.5, A 1 gives -1.28; rho 0.5, A -1 gives 0.8; rho 1.5, A -1 gives 1.5; with c 3, rho 5,
    A -1 gives 3.
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
