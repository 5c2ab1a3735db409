"""Log-probs, entropies and candidates' log-probs as in logprobs.py, for a head that is trained itself.

The gradient of a trained head is a sum over tokens of (gradient of the token's logits) x (its hidden state), and a
chunk's logits are all that is ever in memory: the backward pass computes them again, chunk by chunk, and adds each
chunk's share to one matrix like the head. With p the token's distribution at temperature T and H its entropy:

    d log p(c) / d logit(v) = (onehot(c) - p)(v) / T
    d H / d logit(v)        = -p(v) (log p(v) + H) / T
"""

from typing import Any

import torch
from torch import Tensor

from trainer.model.logprobs import TokenScores, chunk_rows


class _TrainedHeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        candidates: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        scored = None if candidates is None else torch.empty(candidates.shape, device=hidden.device)
        chunk = chunk_rows(hidden, len(weight))
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            log_p = _log_distribution(hidden[part], weight, temperatures[part])
            logprobs[part] = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            entropies[part] = -(log_p.exp() * log_p).sum(1)
            if scored is not None and candidates is not None:
                ids = candidates[part]
                scored[part] = log_p.gather(1, ids.clamp(min=0)).masked_fill_(ids < 0, float("-inf"))
        ctx.save_for_backward(hidden, weight, targets, temperatures, candidates, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies, scored

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropies: Tensor, grad_scored: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets, temperatures, candidates, entropies = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        per_candidate = None
        if candidates is not None and grad_scored is not None:
            per_candidate = grad_scored.masked_fill(candidates < 0, 0.0)
        chunk = chunk_rows(hidden, len(weight))
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            log_p = _log_distribution(hidden[part], weight, temperatures[part])
            p = log_p.exp()
            total = grad[part] if per_candidate is None else grad[part] + per_candidate[part].sum(1)
            slope = p * -total.unsqueeze(1)
            if ctx.entropy_gradient:
                slope -= p * (log_p + entropies[part].unsqueeze(1)) * grad_entropies[part].unsqueeze(1)
            slope.scatter_add_(1, targets[part].unsqueeze(1), grad[part].unsqueeze(1))
            if per_candidate is not None:
                slope.scatter_add_(1, candidates[part].clamp(min=0), per_candidate[part])
            slope *= temperatures[part].reciprocal().unsqueeze(1)
            grad_hidden[part] = slope @ weight
            grad_weight.addmm_(slope.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None, None


def _log_distribution(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return (hidden @ weight.t()).mul_(temperatures.reciprocal().unsqueeze(1)).log_softmax(1)


def trained_head_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    candidates: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Returns what `token_scores` returns, with a gradient for the head too. hidden float32 [m, h], weight float32 [v,
    h]; the rest as there. Memory besides the results: a few chunks of logits, and in the backward pass one matrix like
    the head."""
    result: tuple[Tensor, Tensor, Tensor | None] = _TrainedHeadFunction.apply(
        hidden, weight, targets, temperatures, candidates, entropy_gradient
    )
    return TokenScores(*result)
