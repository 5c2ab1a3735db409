"""GSPO: one ratio for a whole sequence."""

import torch
from torch import Tensor

from trainer.losses.settings import Loss
from trainer.losses.tokens import Metrics, Tokens, sequence_means


def gspo(tokens: Tokens, loss: Loss) -> tuple[Tensor, Metrics]:
    """Sum over tokens of w max(-s A, -clip(s, 1 - gspo_low, 1 + gspo_high) A), s = exp(mean over the sequence's tokens
    of log pi - log mu).

    arXiv 2507.18071, in the paper's token form s_t = sg(s) pi_t / sg(pi_t), which has the same value and, where the
    advantage is one number per sequence, the same gradient, s A / length for every token. Denominator: by default
    (`sequence_mean`) w = 1 / length and the number of sequences. Tokens without a finite log-prob are not in the mean.

    Log-ratios .001 and -.001 give s = 1.
    """
    means = sequence_means(tokens.log_ratio(loss.log_ratio_clamp).detach(), tokens.sequences)
    ratio = (tokens.logprobs - tokens.logprobs.detach() + means).exp()
    free = -ratio * tokens.advantages
    bound = -ratio.clamp(1.0 - loss.gspo_low, 1.0 + loss.gspo_high) * tokens.advantages
    per_token = torch.maximum(free, bound)
    return (per_token * tokens.weights).sum(), {"clipped": (bound > free).detach().float().sum()}
