"""Attention over a packed sequence: each span with itself and its prompt, nothing across samples."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.pack import Span

NAME = "tentalis_packed"


def register() -> None:
    """Makes the implementation known to transformers under NAME. A model takes the spans as a keyword of its
    forward."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    spans: Sequence[Span] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d].

    One call per span instead of one with a [T, T] mask: most of such a matrix would be computed and thrown away.
    """
    if spans is None:
        raise RuntimeError("the packed attention needs the spans of the micro-batch")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs = []
    for span in spans:
        own = slice(span.start, span.end)
        k, v = key[:, :, own], value[:, :, own]
        mask = None
        if span.prefix_end > span.prefix_start:
            prefix = slice(span.prefix_start, span.prefix_end)
            k, v = torch.cat((key[:, :, prefix], k), 2), torch.cat((value[:, :, prefix], v), 2)
            mask = _causal_after(span.prefix_end - span.prefix_start, span.end - span.start, query.device)
        outputs.append(
            scaled_dot_product_attention(query[:, :, own], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


@lru_cache(maxsize=512)
def _causal_after(prefix: int, length: int, device: torch.device) -> Tensor:
    """bool [length, prefix + length]: the whole prefix, and oneself causally."""
    return torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril_(prefix)
