"""Masking by the difference of probabilities, as in prime-rl."""

import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.tokens import LossTokens, Metrics


def masked(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of w (-keep A rho + mask_kl (log rho)^2), where keep is 0 if the token's probability
    already moved too far in the advantage's direction: pi - mu > mask_high with A > 0, or pi - mu < -mask_low
    otherwise.

    A trust region in total variation instead of in the ratio, because a bound on the ratio is harsh on rare tokens:
    arXiv 2602.04879. rho is differentiable and unclipped (except for log_ratio_clamp); the mask_kl term applies to all
    tokens. Denominator: the sum of the weights over the batch.

    Example: mu 0.1, pi 0.4, A 1: only the mask_kl term. mu 0.1, pi 0.2, A 1: -2, although rho is 2.
    """
    log_ratio = tokens.log_ratio(loss.log_ratio_clamp)
    with torch.no_grad():
        moved = tokens.logprobs.exp() - tokens.sampler_logprobs.exp()
        drop = torch.where(tokens.advantages > 0, moved > loss.mask_high, moved < -loss.mask_low)
    gain = torch.where(drop, 0.0, tokens.advantages) * log_ratio.exp()
    per_token = loss.mask_kl * log_ratio.square() - gain
    return (per_token * tokens.weights).sum(), {"clipped": drop.float().sum()}
