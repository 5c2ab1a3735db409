"""Counts the floating point operations of a packed micro-batch, forward and backward: the numerator of MFU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trainer.data.pack import PackedSpan


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters of the frozen linear layers (`body`), of a frozen `head`, of the trained linear layers (`adapter`;
    with full fine-tuning all of them) and of a trained head; `layers` of attention, each with queries of `width` =
    heads * head size."""

    body: int
    head: int
    adapter: int
    layers: int
    width: int
    trained_head: int = 0


def attention_width(config: Any) -> int:
    """Returns the size of all queries of a position: heads * head size. `config`: of the model."""
    heads: int = config.num_attention_heads
    head_size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * head_size


def packed_flops(spans: "Sequence[PackedSpan]", trained_tokens: int, shape: ModelShape) -> float:
    """Returns the operations of one forward and backward pass; a multiplication and an addition count as two.

    Per position: 4 for each frozen parameter (the product and its input's gradient; a frozen matrix has no gradient
    itself) and 6 for each of the adapter. Per trained token: 4 for each of the head, 6 if it is trained. Per layer and
    pair of a query and a key that it attends to: 12 * width (two products of 2 * width forward, twice that backward); a
    causal span has n * (prompt + (n + 1) / 2) such pairs. Recomputed operations count once; norms and activations are
    not counted.
    """
    positions = sum(span.end - span.start for span in spans)
    pairs = sum((n := span.end - span.start) * (span.prefix_end - span.prefix_start + (n + 1) / 2) for span in spans)
    return (
        positions * (4.0 * shape.body + 6.0 * shape.adapter)
        + trained_tokens * (4.0 * shape.head + 6.0 * shape.trained_head)
        + pairs * 12.0 * shape.layers * shape.width
    )


def measure_peak_flops(dtype: "torch.dtype", device: str, n: int, rounds: int) -> float:
    """Measures the operations per second of the fastest of several products of two n x n matrices, computed as the
    trainer does."""
    import torch

    from trainer.model.packed_linear import PackedLinear

    # Random: a product of equal numbers needs less power, so a GPU clocks it higher.
    x, weight = (torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device, dtype) for _ in range(2))
    head, best = PackedLinear.of(weight), 0.0
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        head.project(x)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * n**3 / (time.perf_counter() - began))
    return best
