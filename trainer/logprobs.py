"""Log-probs of chosen tokens without ever holding [tokens, vocabulary] for the backward pass."""

from typing import Any

import torch
from torch import Tensor

from trainer.frozen import Frozen

CHUNK_BYTES = 64 * 2**20


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of log p(token) with respect to the hidden state is W[token] - sum_v p(v) W[v], over the
    temperature: a vector of the hidden size. It is formed while the chunk's logits are at hand, so the backward pass
    is one product per token, nothing is computed twice, and the frozen head gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Frozen, rows: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        slope = torch.empty_like(hidden)
        chunk = max(1, CHUNK_BYTES // (4 * len(rows)))
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            inverse = temperatures[part].reciprocal().unsqueeze(1)
            logits = head.project(hidden[part]).float().mul_(inverse)
            log_z = logits.logsumexp(1, keepdim=True)
            picked = logits.gather(1, targets[part].unsqueeze(1))
            logprobs[part] = (picked - log_z).squeeze(1)
            probabilities = logits.sub_(log_z).exp()
            entropies[part] = -torch.linalg.vecdot(probabilities, logits)
            expected = head.back(probabilities.to(rows.dtype))
            slope[part] = (rows[targets[part]] - expected) * inverse.to(rows.dtype)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad.unsqueeze(1).to(slope.dtype), None, None, None, None


def token_logprobs(
    hidden: Tensor, head: Frozen, rows: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ W.T / temperature)[target] and the entropy of that distribution, float32 [m] each.

    hidden [m, h]; `head` the products with W and `rows` W itself, [v, h], frozen; targets int64 [m]; temperatures
    float32 [m], all > 0. The entropy has no gradient.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden, head, rows, targets, temperatures)
    return result
