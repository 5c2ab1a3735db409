"""Floating point operations that a packed micro-batch needs, forward and backward: what MFU is a fraction of."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.pack import Span


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the frozen linear layers (`body`), the head and the adapter; `layers` of attention, each with
    queries of `width` = heads * head size."""

    body: int
    head: int
    adapter: int
    layers: int
    width: int


def packed_flops(spans: "Sequence[Span]", trained_tokens: int, shape: Shape) -> float:
    """The operations of one forward and backward pass, a multiplication and an addition counted as two.

    Per position 4 for each frozen parameter (the product and its input's gradient; a frozen matrix has none of its own)
    and 6 for each of the adapter; per trained token 4 for each of the head; per layer and pair of a query and a key
    that it sees, 12 * width (two products of 2 * width forward, twice that backward), of which a causal span has
    n * (prompt + (n + 1) / 2). Nothing is counted twice that is computed again, and no norm or activation at all.
    """
    positions = sum(span.end - span.start for span in spans)
    pairs = sum((n := span.end - span.start) * (span.prefix_end - span.prefix_start + (n + 1) / 2) for span in spans)
    return (
        positions * (4.0 * shape.body + 6.0 * shape.adapter)
        + trained_tokens * 4.0 * shape.head
        + pairs * 12.0 * shape.layers * shape.width
    )


def matmul_peak(dtype: "torch.dtype", device: str, n: int, rounds: int) -> float:
    """Operations per second of the fastest of some products of two n x n matrices, as the trainer computes them."""
    import torch

    from trainer.frozen import Frozen

    x, head, best = (
        torch.ones(n, n, dtype=dtype, device=device),
        Frozen.of(torch.ones(n, n, dtype=dtype, device=device)),
        0.0,
    )
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        head.project(x)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * n**3 / (time.perf_counter() - began))
    return best
