"""A linear layer with a low-rank update as one operation: fewer passes over the activations than the generic layers."""

from typing import Any

import torch
from torch import Tensor


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T for a frozen W, b. x [n, in], W [out, in], A [r, in], B [out, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        inner = x.to(a.dtype) @ a.t()
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        if y.dtype == b.dtype:
            y.addmm_(inner, b.t(), alpha=scaling)
        else:
            y += (inner @ b.t()).mul_(scaling).to(y.dtype)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, a, b, inner = ctx.saved_tensors
        wide = grad.to(b.dtype)
        grad_b = (wide.t() @ inner).mul_(ctx.scaling)
        grad_inner = (wide @ b).mul_(ctx.scaling)
        grad_a = grad_inner.t() @ x.to(a.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if grad_x.dtype == a.dtype:
                grad_x.addmm_(grad_inner, a)
            else:
                grad_x += (grad_inner @ a).to(grad_x.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """x [..., in] -> [..., out] in x's dtype: the frozen layer plus scaling * B A. Gradients for x, A and B only."""
    y: Tensor = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, a, b, scaling)
    return y.view(*x.shape[:-1], -1)
