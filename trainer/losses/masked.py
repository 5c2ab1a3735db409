"""Masking by the difference of probabilities, as in prime-rl."""

import torch
from torch import Tensor

from trainer.losses.settings import Loss
from trainer.losses.tokens import Metrics, Tokens


def masked(tokens: Tokens, loss: Loss) -> tuple[Tensor, Metrics]:
    """Sum over tokens of w (-keep A rho + mask_kl (log rho)^2), where keep is 0 if the token's probability already
    moved too far in the advantage's direction: pi - mu > mask_high with A > 0, or pi - mu < -mask_low otherwise.

    A trust region in total variation instead of in the ratio, which is harsh on rare tokens: arXiv 2602.04879. rho is
    differentiable and unclipped (but for log_ratio_clamp); the pull back to the sampler holds for all tokens.
    Denominator: the sum of the weights over the batch.

    mu 0.1, pi 0.4, A 1: nothing but the pull. mu 0.1, pi 0.2, A 1: -2, though rho is 2.
    """
    log_ratio = tokens.log_ratio(loss.log_ratio_clamp)
    with torch.no_grad():
        moved = tokens.logprobs.exp() - tokens.sampler_logprobs.exp()
        drop = torch.where(tokens.advantages > 0, moved > loss.mask_high, moved < -loss.mask_low)
    gain = torch.where(drop, 0.0, tokens.advantages) * log_ratio.exp()
    per_token = loss.mask_kl * log_ratio.square() - gain
    return (per_token * tokens.weights).sum(), {"clipped": drop.float().sum()}
