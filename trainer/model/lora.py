"""A linear layer with a low-rank update as one operation: fewer passes over the activations than PEFT's layers."""

from typing import Any

import torch
from torch import Tensor

from trainer.model.packed_linear import PackedLinear


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + s (x A^T) B^T for a frozen W. x [n, in], A [r, in], B [out, r]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: PackedLinear, a: Tensor, b: Tensor, scaling: float) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, a, b, inner = ctx.saved_tensors
        wide = grad.to(b.dtype)
        grad_b = (wide.t() @ inner).mul_(ctx.scaling)
        grad_inner = (wide @ b).mul_(ctx.scaling)
        grad_a = grad_inner.t() @ x.to(a.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.frozen.project_back(grad)
            if grad_x.dtype == a.dtype:
                grad_x.addmm_(grad_inner, a)
            else:
                grad_x += (grad_inner @ a).to(grad_x.dtype)
        return grad_x, None, grad_a, grad_b, None


def lora_linear(x: Tensor, frozen: PackedLinear, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """x [..., in] -> [..., out] in x's dtype: the frozen layer plus scaling * B A. Gradients for x, A and B only."""
    y: Tensor = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), frozen, a, b, scaling)
    return y.view(*x.shape[:-1], -1)
