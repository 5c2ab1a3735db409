"""A decoder's elementwise parts with fewer passes over the activations, for GPUs: there they are bound by memory.

Norms are torch's fused kernel. The gated activation keeps its two inputs for the backward pass and nothing else. The
rotation of queries and keys writes its result without copies of the halves. On a CPU nothing of this is used.
"""

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROTATE = "apply_rotary_pos_emb"
_ROWS = 4


def fuse_elementwise(decoder: nn.Module) -> list[str]:
    """Replaces norms, gated activations and rotations of a decoder of the Llama family, in place; returns the kinds
    that were replaced, sorted.

    Each replacement is compared first with what it replaces, on random numbers: a module that computes something else
    under the same names keeps its own."""
    replaced = set()
    weights = next(iter(decoder.parameters()))
    module: Any
    for module in decoder.modules():
        if hasattr(module, "variance_epsilon") and _replace(module, rms_norm, len(module.weight), weights):
            replaced.add("norm")
        is_gated = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        if is_gated and _replace(module, gated_mlp, module.gate_proj.in_features, weights):
            replaced.add("activation")
        namespace = vars(sys.modules[type(module).__module__])
        if _ROTATE in namespace and _rotates_halves(namespace[_ROTATE]):
            # A function of transformers' module, so it is replaced for the process.
            namespace[_ROTATE] = rotate_halves
            replaced.add("rotation")
    return sorted(replaced)


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """x [..., n] -> x / rms(x) * weight [n], summed in float32 (https://arxiv.org/abs/1910.07467)."""
    return functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def gated_mlp(module: Any, x: Tensor) -> Tensor:
    """x [..., n] -> down(silu(gate(x)) * up(x)) [..., n] (https://arxiv.org/abs/2002.05202)."""
    gated: Tensor = _SiluProduct.apply(module.gate_proj(x), module.up_proj(x))
    down: Tensor = module.down_proj(gated)
    return down


class _SiluProduct(torch.autograd.Function):
    """silu(gate) * up; computes silu(gate) again in the backward pass instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, functional.silu(gate).mul_(grad)


def rotate_halves(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864): x1, x2 -> x1 cos - x2 sin, x2 cos + x1 sin for the
    halves of the last dimension. query, key [1, heads, T, d]; cos, sin [1, T, d], both halves equal."""
    cos, sin = (each.unsqueeze(unsqueeze_dim)[..., : each.shape[-1] // 2] for each in (cos, sin))
    rotated: tuple[Tensor, Tensor] = (_Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin))
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    result = torch.empty_like(x)
    torch.mul(first, cos, out=result[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=result[..., half:]).addcmul_(first, sin)
    return result


def _replace(module: nn.Module, function: Callable[[Any, Tensor], Tensor], size: int, like: Tensor) -> bool:
    """Sets a module's forward to a function of it and its input [..., size], if the two agree; the input has the dtype
    and device of `like`."""
    x = _random((_ROWS, size), like)
    with torch.no_grad():
        agrees = _agree(module(x), function(module, x))
    if agrees:
        module.forward = MethodType(function, module)
    return agrees


def _rotates_halves(function: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    like, size = torch.empty(0), 8
    query, key = _random((1, 2, _ROWS, size), like), _random((1, 1, _ROWS, size), like)
    angles = _random((1, _ROWS, size // 2), like).repeat(1, 1, 2)
    given = query, key, angles.cos(), angles.sin()
    return function is not rotate_halves and all(map(_agree, function(*given), rotate_halves(*given)))


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _agree(expected: Tensor, found: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
    return bool(
        torch.allclose(expected.float(), found.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    )
