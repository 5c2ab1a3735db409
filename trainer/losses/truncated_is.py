"""Truncated importance sampling: corrects the mismatch between trainer and sampler."""

import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.tokens import LossTokens, Metrics, sequence_sums


def importance_weights(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """Returns the weights float32 [T], without gradient, and a mask [T] of those that were out of bounds.

    Per token exp(log pi - log mu), or with `level: sequence` the exponential of the sum over the sequence. A weight
    above `high` or below `low` is set to the bound (truncate) or to 0 (mask). Example: with high 2 a difference of 1
    gives 2, not e.
    """
    options = loss.importance
    with torch.no_grad():
        log_ratio = tokens.logprobs - tokens.sampler_logprobs
        if options.level == "sequence":
            log_ratio = sequence_sums(log_ratio, tokens.sequences, tokens.n_sequences)[0][tokens.sequences]
        ratio = log_ratio.clamp(-loss.log_ratio_clamp, loss.log_ratio_clamp).exp()
        bounded = ratio.clamp(options.low, options.high)
        out = bounded != ratio
        return (torch.where(out, 0.0, ratio) if options.mode == "mask" else bounded), out


def truncated_is(tokens: LossTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens of -w_t sg(v) A pi / sg(pi), v the truncated weight of `importance_weights`.

    A batch is used for one optimizer step, so the policy before the step is the policy itself: the surrogate's own
    ratio pi / sg(pi) is 1 and its gradient the policy gradient; only v corrects for the sampler. Yao et al. 2025 (the
    blog post on the mismatch of rollout and training engines); masking: IcePop; per sequence: TRL's sequence_mask.
    Denominator: the sum of the weights w_t over the batch, not of v.
    """
    weight, out = importance_weights(tokens, loss)
    per_token = -weight * tokens.advantages * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return (per_token * tokens.weights).sum(), {"clipped": out.float().sum()}
