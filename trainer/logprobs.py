"""Log-probs, entropies and candidates' log-probs without ever holding [tokens, vocabulary].

The head is frozen, so the gradient of everything here with respect to a token's hidden state is a vector of the hidden
size. With W the head [v, h], T the temperature, p the token's distribution and E = sum_v p(v) W[v]:

    d log p(c) / d hidden = (W[c] - E) / T
    d H / d hidden        = -(sum_v p(v) log p(v) W[v] + H E) / T

E (and the sum of the second line where the entropy is trained) is formed while a chunk's logits are at hand: the
backward pass is products of size [tokens, h], nothing is computed twice, and the head gets no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trainer.frozen import Frozen

# float32 logits of one chunk. Two more of this size live beside it. Below 32 MiB glibc keeps freed memory instead of
# returning it to the kernel, which would fault in every page of every chunk again.
CHUNK_BYTES = 24 * 2**20


class TokenScores(NamedTuple):
    """Of each trained token, in the order of the pack: `logprobs` and `entropies` float32 [m], and `candidates` float32
    [m, c], the log-probs of the candidate ids that were asked for (-inf where the id is -1). `likeliest` int64 [m, k]:
    the first k of the candidates, where those are the policy's own likeliest tokens."""

    logprobs: Tensor
    entropies: Tensor
    candidates: Tensor | None = None
    likeliest: Tensor | None = None


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Frozen,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        candidates: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        m, trains = len(hidden), ctx.needs_input_grad[0]
        logprobs = torch.empty(m, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        scored = None if candidates is None else torch.empty(candidates.shape, device=hidden.device)
        expected = torch.empty_like(hidden) if trains else None
        entropy_slope = torch.empty_like(hidden) if trains and entropy_gradient else None
        chunk = max(1, CHUNK_BYTES // (4 * len(rows)))
        for begin in range(0, m, chunk):
            part = slice(begin, begin + chunk)
            logits = head.project(hidden[part]).float().mul_(temperatures[part].reciprocal().unsqueeze(1))
            logits.sub_(logits.amax(1, keepdim=True))
            weights = logits.exp()
            z = weights.sum(1, keepdim=True)
            log_z = z.log()
            logprobs[part] = (logits.gather(1, targets[part].unsqueeze(1)) - log_z).squeeze(1)
            if scored is not None and candidates is not None:
                ids = candidates[part]
                picked = logits.gather(1, ids.clamp(min=0)) - log_z
                scored[part] = picked.masked_fill_(ids < 0, float("-inf"))
            if expected is not None:
                expected[part] = head.back(weights.to(rows.dtype)) / z.to(rows.dtype)
            # sum_v p log p = sum_v weights * logits / z - log z
            weighted = weights.mul_(logits)
            entropies[part] = (log_z - weighted.sum(1, keepdim=True) / z).squeeze(1)
            if entropy_slope is not None and expected is not None:
                second = head.back(weighted.to(rows.dtype)) / z.to(rows.dtype)
                shift = entropies[part].unsqueeze(1) - log_z
                entropy_slope[part] = -(second + shift.to(rows.dtype) * expected[part])
        ctx.head_rows = rows
        ctx.save_for_backward(targets, temperatures, candidates, expected, entropy_slope)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies, scored

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropies: Tensor, grad_scored: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        targets, temperatures, candidates, expected, entropy_slope = ctx.saved_tensors
        rows = ctx.head_rows
        inverse = temperatures.reciprocal()
        per_token = grad * inverse
        slope = (rows[targets] - expected).mul_(per_token.unsqueeze(1).to(rows.dtype))
        if candidates is not None and grad_scored is not None:
            per_candidate = (grad_scored * inverse.unsqueeze(1)).masked_fill(candidates < 0, 0.0)
            shares = per_candidate.to(rows.dtype)
            slope += embedding_bag(candidates.clamp(min=0), rows, per_sample_weights=shares, mode="sum")
            slope -= expected * per_candidate.sum(1, keepdim=True).to(rows.dtype)
        if entropy_slope is not None:
            slope += entropy_slope * (grad_entropies * inverse).unsqueeze(1).to(rows.dtype)
        return slope, None, None, None, None, None, None


def token_scores(
    hidden: Tensor,
    head: Frozen,
    rows: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    candidates: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """log softmax(hidden @ W.T / temperature) at the targets and at the candidates, and that distribution's entropy.

    hidden [m, h]; `head` the products with W and `rows` W itself, [v, h], frozen; targets int64 [m]; temperatures
    float32 [m], all > 0; candidates int64 [m, k], -1 for none. Memory beside the results: three chunks of CHUNK_BYTES,
    and one or (with `entropy_gradient`, which costs one more product with the head) two tensors like `hidden`. The
    entropy has a gradient only if asked for.
    """
    result: tuple[Tensor, Tensor, Tensor | None] = _Scores.apply(
        hidden, head, rows, targets, temperatures, candidates, entropy_gradient
    )
    return TokenScores(*result)


@torch.no_grad()
def likeliest_ids(hidden: Tensor, head: Frozen, n_rows: int, k: int) -> Tensor:
    """The k likeliest tokens after each hidden state [m, h], likeliest first, int64 [m, k]; chunk by chunk."""
    ids = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    chunk = max(1, CHUNK_BYTES // (4 * n_rows))
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        ids[part] = head.project(hidden[part]).float().topk(k, dim=1).indices
    return ids
