"""Losses: pure functions of per-token inputs that return `(sum, metrics)`. The caller divides by counts that were fixed
over all ranks before the first micro-batch, so neither micro-batches nor ranks change the gradient.

    loss = rl_weight * L(A_rl) / N_rl + opd_weight * L(A_opd) / N_opd

with L the sum of the clipped surrogate over the tokens of that part, A_rl the rollout's advantage, A_opd the per-token
clip(log teacher - log sampler, +-C), and N the number of that part's tokens in the whole batch.
"""

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Sums over tokens, detached, to be added over micro-batches and ranks and divided by the token count at the end."""


def clipped_surrogate(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_clamp: float,
) -> tuple[Tensor, Metrics]:
    """Sum over tokens of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / mu against the *sampler's*
    log-probs (PPO, arXiv 1707.06347; asymmetric bounds: DAPO, arXiv 2503.14476).

    All inputs float32 [n], finite; sampler and advantages carry no gradient. With clip 0.2 / 0.28: rho 1.5, A 1 gives
    -1.28; rho 0.5, A -1 gives 0.8; rho 1.5, A -1 gives 1.5. log rho is cut at +-log_ratio_clamp before the exponential.
    """
    log_ratio = (logprobs - sampler_logprobs).clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio = log_ratio.exp()
    free = ratio * advantages
    bound = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    with torch.no_grad():
        metrics = {
            "ratio": ratio.sum(),
            "clipped": (bound < free).float().sum(),
            # k3, John Schulman's estimator of KL(mu || pi) from samples of mu: never negative.
            "mismatch_kl": (ratio - 1.0 - log_ratio).sum(),
        }
    return -torch.minimum(free, bound).sum(), metrics


def distillation_advantages(teacher_logprobs: Tensor, sampler_logprobs: Tensor, clip: float) -> Tensor:
    """clip(log pi_teacher - log mu, +-clip) per token, float32 [n]: on-policy distillation as a policy gradient on the
    student's own tokens (OpenClaw-RL, section on OPD). Non-finite differences are the caller's to leave out."""
    return (teacher_logprobs - sampler_logprobs).clamp(-clip, clip)
