"""A linear layer with a low-rank update as one operation: fewer passes over the activations than PEFT's layers.

The factors are float32. Products with them are float32 on a CPU, whatever the precision of the base. On a GPU they
have the precision of the base (`narrow`): float32 products are many times slower there, and need wide copies of all
activations. The gradients of the factors are summed in float32 in both cases.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.model.packed_linear import PackedLinear


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + s (x A^T) B^T for a frozen W. x [n, in], A [r, in], B [out, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, frozen: PackedLinear, a: Tensor, b: Tensor, scaling: float, narrow: bool
    ) -> Tensor:
        if narrow:
            a, b = a.to(x.dtype), b.to(x.dtype)
        inner = x.to(a.dtype) @ a.t()
        y = frozen.project(x)
        if y.dtype == b.dtype:
            y.addmm_(inner, b.t(), alpha=scaling)
        else:
            y += (inner @ b.t()).mul_(scaling).to(y.dtype)
        ctx.save_for_backward(x, a, b, inner)
        ctx.frozen, ctx.scaling = frozen, scaling
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None, None]:
        x, a, b, inner = ctx.saved_tensors
        wide = grad.to(b.dtype)
        grad_b = _float32_product(wide.t(), inner).mul_(ctx.scaling)
        grad_inner = (wide @ b).mul_(ctx.scaling)
        grad_a = _float32_product(grad_inner.t(), x.to(a.dtype))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.frozen.project_back(grad)
            if grad_x.dtype == a.dtype:
                grad_x.addmm_(grad_inner, a)
            else:
                grad_x += (grad_inner @ a).to(grad_x.dtype)
        return grad_x, None, grad_a, grad_b, None, None


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """left [m, n], right [n, k] of one dtype -> float32 [m, k], summed in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def lora_linear(
    x: Tensor, frozen: PackedLinear, a: Tensor, b: Tensor, scaling: float, *, narrow: bool = False
) -> Tensor:
    """x [..., in] -> [..., out] in x's dtype: the frozen layer plus scaling * B A. Gradients for x, A and B only.

    a float32 [r, in], b float32 [out, r]; `narrow`: the products with them have x's dtype."""
    y: Tensor = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), frozen, a, b, scaling, narrow)
    return y.view(*x.shape[:-1], -1)
