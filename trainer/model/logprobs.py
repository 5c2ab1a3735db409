"""Log-probs, entropies and candidates' log-probs without ever allocating [tokens, vocabulary].

The head is frozen, so the gradient of everything here with respect to a token's hidden state is a vector of the hidden
size. With W the head [v, h], T the temperature, p the token's distribution and E = sum_v p(v) W[v]:

    d log p(c) / d hidden = (W[c] - E) / T
    d H / d hidden        = -(sum_v p(v) log p(v) W[v] + H E) / T

E (and the sum of the second line where the entropy is trained) is computed while a chunk's logits are in memory: the
backward pass consists of products of size [tokens, h], nothing is computed twice, and the head gets no gradient.

A token with p(c) close to 1 has W[c] close to E, and in bfloat16 their difference is nothing but rounding. So with a
head of less than float32 the sums are formed as differences in float32 and rounded then: with a the most likely token,
W[c] - E = (W[c] - W[a]) + (onehot(a) - p) W, and the entropy's is -sum_v p(v) (log p(v) + H) W[v] / T.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trainer.model.packed_linear import PackedLinear

# float32 logits of one chunk; two more buffers of this size exist at the same time. Below 32 MiB glibc keeps freed
# memory instead of returning it to the kernel, which would fault in every page of every chunk again.
CHUNK_BYTES = 24 * 2**20
# A GPU needs products of many rows: 24 MiB are 41 rows at a vocabulary of 152k. A constant, because the memory that
# happens to be free must not decide how a sum is split.
GPU_CHUNK_BYTES = 2**30


class TokenScores(NamedTuple):
    """Scores of each trained token, in the order of the pack: `logprobs` and `entropies` float32 [m], and `candidates`
    float32 [m, c], the log-probs of the requested candidate ids (-inf where the id is -1). `likeliest` int64 [m, k]:
    the first k candidates, if those are the policy's own most likely tokens."""

    logprobs: Tensor
    entropies: Tensor
    candidates: Tensor | None = None
    likeliest: Tensor | None = None


class _TokenScoresFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: PackedLinear,
        head_weight: Tensor,
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
        # float32 heads keep the sums of earlier releases, so that their runs replay to the same bytes.
        anchors = torch.empty_like(targets) if head_weight.dtype is not torch.float32 else None
        chunk = chunk_rows(hidden, len(head_weight))
        for begin in range(0, m, chunk):
            part = slice(begin, begin + chunk)
            logits = head.project(hidden[part]).float().mul_(temperatures[part].reciprocal().unsqueeze(1))
            if anchors is not None:
                anchors[part] = logits.argmax(1)
            logits.sub_(logits.amax(1, keepdim=True))
            weights = logits.exp()
            z = weights.sum(1, keepdim=True)
            log_z = z.log()
            logprobs[part] = (logits.gather(1, targets[part].unsqueeze(1)) - log_z).squeeze(1)
            if scored is not None and candidates is not None:
                ids = candidates[part]
                candidate_logits = logits.gather(1, ids.clamp(min=0)) - log_z
                scored[part] = candidate_logits.masked_fill_(ids < 0, float("-inf"))
            if anchors is not None:
                p, p_log_p = weights.div_(z), logits.mul_(weights)
                entropies[part] = (log_z - p_log_p.sum(1, keepdim=True)).squeeze(1)
                if entropy_slope is not None:
                    p_log_p.addcmul_(p, entropies[part].unsqueeze(1) - log_z)
                    entropy_slope[part] = head.project_back(p_log_p.to(head_weight.dtype)).neg_()
                if expected is not None:
                    difference = p.neg_().scatter_add_(1, anchors[part].unsqueeze(1), torch.ones_like(z))
                    expected[part] = head.project_back(difference.to(head_weight.dtype))
                continue
            if expected is not None:
                expected[part] = head.project_back(weights.to(head_weight.dtype)) / z.to(head_weight.dtype)
            # sum_v p log p = sum_v weights * logits / z - log z
            weighted = weights.mul_(logits)
            entropies[part] = (log_z - weighted.sum(1, keepdim=True) / z).squeeze(1)
            if entropy_slope is not None and expected is not None:
                second = head.project_back(weighted.to(head_weight.dtype)) / z.to(head_weight.dtype)
                shift = entropies[part].unsqueeze(1) - log_z
                entropy_slope[part] = -(second + shift.to(head_weight.dtype) * expected[part])
        ctx.head_weight = head_weight
        ctx.save_for_backward(targets, temperatures, candidates, anchors, expected, entropy_slope)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies, scored

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropies: Tensor, grad_scored: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        targets, temperatures, candidates, anchors, expected, entropy_slope = ctx.saved_tensors
        head_weight = ctx.head_weight
        inverse = temperatures.reciprocal()
        if anchors is not None:
            slope = _rounded_slope(
                head_weight, targets, grad * inverse, candidates, grad_scored, inverse, anchors, expected
            )
            if entropy_slope is not None:
                slope += entropy_slope * (grad_entropies * inverse).unsqueeze(1)
            return slope.to(head_weight.dtype), None, None, None, None, None, None
        per_token = grad * inverse
        slope = (head_weight[targets] - expected).mul_(per_token.unsqueeze(1).to(head_weight.dtype))
        if candidates is not None and grad_scored is not None:
            per_candidate = (grad_scored * inverse.unsqueeze(1)).masked_fill(candidates < 0, 0.0)
            shares = per_candidate.to(head_weight.dtype)
            slope += embedding_bag(candidates.clamp(min=0), head_weight, per_sample_weights=shares, mode="sum")
            slope -= expected * per_candidate.sum(1, keepdim=True).to(head_weight.dtype)
        if entropy_slope is not None:
            slope += entropy_slope * (grad_entropies * inverse).unsqueeze(1).to(head_weight.dtype)
        return slope, None, None, None, None, None, None


def _rounded_slope(
    head_weight: Tensor,
    targets: Tensor,
    per_token: Tensor,
    candidates: Tensor | None,
    grad_scored: Tensor | None,
    inverse: Tensor,
    anchors: Tensor,
    residual: Tensor,
) -> Tensor:
    """Returns the gradient of the log-probs with respect to the hidden states in float32, for a head of less. `anchors`
    int64 [m], the most likely tokens a; `residual` [m, h], (onehot(a) - p) W."""
    anchor_rows, total = head_weight[anchors].float(), per_token
    slope = (head_weight[targets].float() - anchor_rows) * per_token.unsqueeze(1)
    if candidates is not None and grad_scored is not None:
        per_candidate = (grad_scored * inverse.unsqueeze(1)).masked_fill(candidates < 0, 0.0)
        total = total + per_candidate.sum(1)
        # W[a] - W[a] is 0, whatever the share of a.
        shares = per_candidate.masked_fill(candidates == anchors.unsqueeze(1), 0.0).to(head_weight.dtype)
        slope += embedding_bag(candidates.clamp(min=0), head_weight, per_sample_weights=shares, mode="sum")
        slope -= anchor_rows * shares.float().sum(1, keepdim=True)
    return slope + residual * total.unsqueeze(1)


def token_scores(
    hidden: Tensor,
    head: PackedLinear,
    head_weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    candidates: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Returns log softmax(hidden @ W.T / temperature) at the targets and at the candidates, and that distribution's
    entropy.

    hidden [m, h]; `head` the products with W and `head_weight` W itself, [v, h], frozen; targets int64 [m];
    temperatures float32 [m], all > 0; candidates int64 [m, k], -1 for none. Memory besides the results: three
    chunks of CHUNK_BYTES (on a GPU GPU_CHUNK_BYTES), and one or (with `entropy_gradient`, which costs one more product
    with the head) two tensors like `hidden`. The entropy has a gradient only with `entropy_gradient`.
    """
    result: tuple[Tensor, Tensor, Tensor | None] = _TokenScoresFunction.apply(
        hidden, head, head_weight, targets, temperatures, candidates, entropy_gradient
    )
    return TokenScores(*result)


def chunk_rows(hidden: Tensor, vocab_size: int) -> int:
    """Returns the number of tokens whose logits are in memory at the same time."""
    return max(1, (GPU_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES) // (4 * vocab_size))


@torch.no_grad()
def top_k_ids(hidden: Tensor, head: PackedLinear, vocab_size: int, k: int) -> Tensor:
    """Returns the k most likely tokens after each hidden state [m, h], most likely first, int64 [m, k]. Works chunk by
    chunk."""
    ids = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    chunk = chunk_rows(hidden, vocab_size)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        ids[part] = head.project(hidden[part]).float().topk(k, dim=1).indices
    return ids
