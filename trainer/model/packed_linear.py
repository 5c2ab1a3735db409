"""Products with a frozen matrix, forward and backward.

For fp32 on a CPU oneDNN stores the matrix in its own layout. On CPUs for which MKL is not optimised this is more than
twice as fast as the ordinary product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The layout is optimised for this many rows; it works with any number.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out, in] and an optional bias [out]; neither is ever trained."""

    forward_layout: Tensor
    backward_layout: Tensor
    bias: Tensor | None
    packed: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "PackedLinear":
        """Prepares the products with a weight. If packed, it holds two copies of the weight and does not need the
        original."""
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
        if not _can_pack(weight):
            return cls(weight, weight, bias, False)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return cls(reorder(weight, _ROWS), reorder(weight.t().contiguous(), _ROWS), bias, True)

    def project(self, x: Tensor) -> Tensor:
        """x [n, in] -> x W^T + bias, [n, out]."""
        if self.packed:
            return _packed_product(x, self.forward_layout, self.bias)
        return torch.nn.functional.linear(x, self.forward_layout, self.bias)

    def project_back(self, grad: Tensor) -> Tensor:
        """grad [n, out] -> grad W, [n, in]: the gradient of `project` with respect to x."""
        if self.packed:
            return _packed_product(grad, self.backward_layout, None)
        return grad @ self.backward_layout


def _packed_product(x: Tensor, layout: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), layout, bias, "none", [], "")
    return y


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
