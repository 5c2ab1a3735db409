"""Draws tokens for a whole batch at once, with the log-probs of the distribution they were drawn from."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tentalis.inference.grammar import Grammar

_BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request. Temperature 0 takes the most likely token and reports log-probs at temperature 1.

    `top_k` 0 means all tokens; `top_logprobs` None means that only the sampled token's log-prob is reported. A sampled
    token's logit is lowered by `presence_penalty`, and by `frequency_penalty` each time that it was sampled before.
    `grammar`: the only texts that the answer may have.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None


def uniforms(seed: int | None, index: int, count: int) -> NDArray[np.float64]:
    """The `count` uniform numbers in [0, 1) that decide sample `index` of a request, one per token.

    With a seed they depend only on (seed, index), never on the rest of the batch.
    """
    entropy = secrets.randbits(128) if seed is None else seed & 0xFFFF_FFFF_FFFF_FFFF
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([entropy, index]))).random(count)


@dataclass(frozen=True)
class DrawnTokens:
    """The result for N rows: `tokens` int64 [N], `logprobs` fp32 [N], `finite` bool [N] (False: the row's logits are
    not finite), and the `width` most likely tokens with their log-probs [N, width]."""

    tokens: Tensor
    logprobs: Tensor
    finite: Tensor
    top_tokens: Tensor | None
    top_logprobs: Tensor | None


def draw(
    logits: Tensor,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    top_k: NDArray[np.int64],
    uniform: NDArray[np.float64],
    top_width: int = 0,
) -> DrawnTokens:
    """Draws one token per row of `logits` fp32 [N, vocab], by inverting the cumulative distribution at `uniform` [N].

    Overwrites `logits`, to which penalties and grammars are applied already. The log-probs are those of the processed
    distribution: penalties, grammar, temperature, top-k, then top-p.
    """
    device = logits.device
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device)
        logits.div_(scale[:, None])
    restricted = np.flatnonzero(((top_k > 0) | (top_p < 1)) & ~greedy)
    if len(restricted):
        rows = torch.from_numpy(restricted).to(device)
        k = torch.from_numpy(top_k[restricted]).to(device)
        p = torch.from_numpy(top_p[restricted]).to(device)
        logits[rows] = _restrict(logits[rows], k, p)
    normaliser = logits.logsumexp(dim=-1)
    finite = torch.isfinite(normaliser)
    best_tokens, best_logprobs = None, None
    if top_width:
        best = logits.topk(top_width, dim=-1)
        best_tokens, best_logprobs = best.indices, best.values - normaliser[:, None]
    if greedy.all():
        tokens = logits.argmax(dim=-1)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - normaliser
    else:
        likeliest = logits.argmax(dim=-1) if greedy.any() else None
        logits.sub_(normaliser[:, None])
        tokens = _invert(logits.exp(), torch.from_numpy(uniform).to(device))
        if likeliest is not None:
            tokens = torch.where(torch.from_numpy(greedy).to(device), likeliest, tokens)
        logprobs = logits.gather(1, tokens[:, None])[:, 0]
    return DrawnTokens(tokens, logprobs, finite, best_tokens, best_logprobs)


def penalise(logits: Tensor, tokens: Sequence[int], presence: float, frequency: float) -> None:
    """Lowers the logits [vocab] of one row, in place, for the tokens that were sampled before."""
    found, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    lowered = torch.from_numpy((presence + frequency * counts).astype(np.float32)).to(logits.device)
    logits[torch.from_numpy(found).to(logits.device)] -= lowered


def allow_only(logits: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Sets the logits [vocab] of one row, in place, to minus infinity where `allowed` [vocab] is False."""
    logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))


def _restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits, minus infinity outside the `top_k` most likely tokens (0: all) and the smallest set of `top_p`
    mass."""
    ordered, order = logits.sort(dim=-1, descending=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    ordered = ordered.masked_fill(~keep, float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    # A token stays while the mass before it is below top_p: the token that crosses the threshold stays.
    keep = (probabilities.cumsum(dim=-1) - probabilities) < top_p[:, None]
    keep[:, 0] = True
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(~keep, float("-inf")))


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """For each row, the token at which the cumulative probability exceeds `uniform` * total.

    Two stages (blocks, then within the block) make the cumulative sums exact enough in float64 without converting the
    whole vocabulary. A token of probability zero is never returned.
    """
    rows, vocab = probabilities.shape
    padding = -vocab % _BLOCK
    if padding:
        probabilities = torch.nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.view(rows, -1, _BLOCK)
    mass = blocks.sum(dim=-1).double()
    cumulated = mass.cumsum(dim=-1)
    target = uniform * cumulated[:, -1]
    block = _first_beyond(mass, cumulated, target)
    picked = torch.arange(rows, device=probabilities.device)
    inside = blocks[picked, block].double()
    before = cumulated[picked, block] - mass[picked, block]
    token = _first_beyond(inside, inside.cumsum(dim=-1), target - before)
    return block * _BLOCK + token


def _first_beyond(weights: Tensor, cumulated: Tensor, target: Tensor) -> Tensor:
    """First index where `cumulated` exceeds `target`; if rounding leaves none, the last index with nonzero weight."""
    index = (cumulated <= target[:, None]).sum(dim=-1)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)
