"""What a loss sees: flat tensors over the tokens of any number of sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.settings import Loss

Metrics = dict[str, Tensor]
"""Sums over tokens, detached, to be added over micro-batches and ranks and divided by counts at the end."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens that the policy chose, all [T]; all but `logprobs` without gradient.

    `logprobs` log pi of the trained policy at the sampling temperature, float32; `sampler_logprobs` log mu, float32,
    finite; `advantages` float32; `weights` float32, what a token counts in the sum (1, or 1 / the length of its
    sequence); `sequences` int64 >= 0, equal for the tokens of one sequence, whose tokens are all here.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor

    def log_ratio(self, clamp: float) -> Tensor:
        """log pi - log mu, cut at +-clamp, float32 [T]."""
        return (self.logprobs - self.sampler_logprobs).clamp(-clamp, clamp)


PolicyLoss = Callable[[Tokens, Loss], tuple[Tensor, Metrics]]
"""(sum over tokens of weight x loss, metrics). Every metric has `clipped`: tokens whose gradient was bounded away."""


def sequence_sums(values: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Per sequence number the sum of its tokens' values, and how many they are: [S] each, S the largest number + 1."""
    n = int(sequences.max()) + 1 if len(sequences) else 0
    zeros = torch.zeros(n, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, sequences, values), zeros.index_add(0, sequences, torch.ones_like(values))


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """For each token the mean over the tokens of its sequence, [T]."""
    sums, counts = sequence_sums(values, sequences)
    return (sums / counts.clamp(min=1.0))[sequences]
