"""GSPO: one ratio for a whole sequence."""

import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.tokens import LossTokens, Metrics, sequence_means


def gspo(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of w max(-s A, -clip(s, 1 - gspo_low, 1 + gspo_high) A), s = exp(mean over the
    sequence's tokens of log pi - log mu).

    arXiv 2507.18071, in the paper's token form s_t = sg(s) pi_t / sg(pi_t). It has the same value and, where the
    advantage is one number per sequence, the same gradient: s A / length for every token, and 0 for one whose log-ratio
    is clamped. Denominator: by default (`sequence_mean`) w = 1 / length and the number of sequences. Tokens without a
    finite log-prob are not in the mean.

    Example: log-ratios .001 and -.001 give s = 1.
    """
    log_ratio = tokens.log_ratio(loss.log_ratio_clamp)
    means = sequence_means(log_ratio.detach(), tokens.sequences, tokens.n_sequences)
    ratio = (log_ratio - log_ratio.detach() + means).exp()
    free = -ratio * tokens.advantages
    bound = -ratio.clamp(1.0 - loss.gspo_low, 1.0 + loss.gspo_high) * tokens.advantages
    per_token = torch.maximum(free, bound)
    return (per_token * tokens.weights).sum(), {"clipped": (bound > free).detach().float().sum()}
