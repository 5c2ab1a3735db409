"""Attention over a packed sequence: each span attends to itself and its prompt, never across samples."""

from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.data.pack import PackedSpan, SpanLayout

ATTENTION_NAME = "tentalis_packed"


def register() -> None:
    """Registers the implementation with transformers under NAME. The model's forward takes the spans as a keyword."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    spans: Sequence[PackedSpan] | None = None,
    layout: SpanLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d].

    On a GPU in half precision: one call of flash attention for sequences of unequal length. Elsewhere (that kernel
    supports neither CPUs nor float32): one call per span instead of one with a [T, T] mask, most of which would be
    computed and thrown away. `layout`: of the same spans, on the GPU.
    """
    if spans is None:
        raise RuntimeError("the packed attention needs the spans of the micro-batch")
    if _has_flash_attention(query):
        if layout is None:
            raise RuntimeError("flash attention needs the layout of the micro-batch")
        return _flash_attention(query[0], key[0], value[0], scaling, layout).unsqueeze(0), None
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
            mask = _causal_mask(span.prefix_end - span.prefix_start, span.end - span.start, query.device)
        outputs.append(
            scaled_dot_product_attention(query[:, :, own], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def _has_flash_attention(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: SpanLayout) -> Tensor:
    """query [heads, T, d], key and value [kv heads, T, d] -> [T, heads, d]. Its backward pass, and that of the gathered
    keys, sum in a fixed order because torch's deterministic algorithms are on (runtime.configure_torch)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    # Some releases of torch lack the argument, and their kernel takes fewer key heads without it.
    has_argument = "enable_gqa" in signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if has_argument and query.shape[0] != key.shape[0] else {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = varlen_attn(
            query.transpose(0, 1),
            key.transpose(0, 1)[layout.rows],
            value.transpose(0, 1)[layout.rows],
            layout.queries,
            layout.keys,
            layout.longest_queries,
            layout.longest_keys,
            scale=scaling,
            window_size=(-1, 0),
            **grouped,
        )
    assert isinstance(output, Tensor)  # a pair only if the log-sum-exp is requested
    return output


@lru_cache(maxsize=512)
def _causal_mask(prefix: int, length: int, device: torch.device) -> Tensor:
    """Returns the mask bool [length, prefix + length]: the whole prefix, and the span itself causally."""
    return torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril_(prefix)
