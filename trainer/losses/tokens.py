"""The input of every policy loss: flat tensors over the tokens of any number of sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.loss import LossConfig

Metrics = dict[str, Tensor]
"""Sums over tokens, detached. They are added over micro-batches and ranks, and divided by counts at the end."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """T tokens of answers, as tensors [T]. Only `logprobs` has a gradient. All tokens of a sequence are included.

    Attributes:
        logprobs: float32, log pi of the trained policy at the sampling temperature.
        sampler_logprobs: float32, log mu of the policy that sampled the token; finite.
        advantages: float32.
        weights: float32, the factor of each token in the sum: 1, or 1 / the length of its sequence.
        sequences: int64 >= 0, the number of the token's sequence.
        n_sequences: an int above every number in `sequences`.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    n_sequences: int

    def log_ratio(self, clamp: float) -> Tensor:
        """Returns log pi - log mu, clamped to +-clamp, float32 [T]."""
        return (self.logprobs - self.sampler_logprobs).clamp(-clamp, clamp)


PolicyLoss = Callable[[LossTokens, LossConfig], tuple[Tensor, Metrics]]
"""(sum over tokens of weight x loss, metrics). Every loss has the metric `clipped`: tokens whose gradient was
bounded."""


def sequence_sums(values: Tensor, sequences: Tensor, n_sequences: int) -> tuple[Tensor, Tensor]:
    """Returns per sequence number below `n_sequences` the sum and the number of its tokens' values: [n_sequences]
    each."""
    zeros = torch.zeros(n_sequences, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, sequences, values), zeros.index_add(0, sequences, torch.ones_like(values))


def sequence_means(values: Tensor, sequences: Tensor, n_sequences: int) -> Tensor:
    """Returns for each token the mean over the tokens of its sequence, [T]."""
    sums, counts = sequence_sums(values, sequences, n_sequences)
    return (sums / counts.clamp(min=1.0))[sequences]
