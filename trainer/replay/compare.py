"""Distance between two adapters: as weight updates, and as policies on given text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class AdapterDistance:
    """`absolute`: the Frobenius norm of (the second adapter's update - the first's) over all layers. `relative`:
    `absolute` over the norm of the first; NaN if the first norm is zero and the second is not."""

    absolute: float
    relative: float


def update_distance(
    first: bytes, second: bytes, first_scale: float = 1.0, second_scale: float = 1.0
) -> AdapterDistance:
    """Returns the distance of two adapters (contents of adapter_model.safetensors) as updates s B A. The ranks may
    differ. A layer that only one of them has counts as a zero update in the other.

    With <B1 A1, B2 A2> = sum((B1^T B2) * (A1 A2^T)) no full update matrix is ever formed. Sums in float64.
    """
    one, other = _factors(first), _factors(second)
    squared = first_squared = 0.0
    for name in sorted({*one, *other}):
        aa = _inner(one.get(name), one.get(name)) * first_scale * first_scale
        bb = _inner(other.get(name), other.get(name)) * second_scale * second_scale
        ab = _inner(one.get(name), other.get(name)) * first_scale * second_scale
        squared += aa + bb - 2.0 * ab
        first_squared += aa
    return _distance(math.sqrt(max(0.0, squared)), math.sqrt(first_squared))


def model_distance(first: bytes, second: bytes, base: Path) -> AdapterDistance:
    """Returns the distance of two whole models (contents of model.safetensors), each taken as an update of the model in
    the folder `base`, from which both were trained. Sums in float64."""
    from safetensors.torch import load

    one, other, origin = load(first), load(second), _model_tensors(base)
    squared = first_squared = 0.0
    for name, tensor in one.items():
        squared += float((other[name].double() - tensor.double()).square().sum())
        first_squared += float((tensor.double() - origin[name].double()).square().sum())
    return _distance(math.sqrt(squared), math.sqrt(first_squared))


def _model_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _distance(absolute: float, first_norm: float) -> AdapterDistance:
    relative = absolute / first_norm if first_norm else 0.0 if absolute == 0.0 else math.nan
    return AdapterDistance(absolute, relative)


def _factors(data: bytes) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (A [r, in], B [out, r]) float64 by layer."""
    from safetensors.torch import load

    tensors = load(data)
    layers = [name.replace(".lora_A.", ".*.") for name in tensors if ".lora_A." in name]
    return {
        layer: (
            tensors[layer.replace(".*.", ".lora_A.")].double(),
            tensors[layer.replace(".*.", ".lora_B.")].double(),
        )
        for layer in layers
    }


def _inner(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None) -> float:
    if one is None or other is None:
        return 0.0
    (a1, b1), (a2, b2) = one, other
    return float(((b1.T @ b2) * (a1 @ a2.T)).sum())


@torch.no_grad()
def kl_sum(first: Tensor, second: Tensor, head: Tensor, second_head: Tensor | None = None) -> float:
    """Returns the sum over positions of KL(softmax(first W^T) || softmax(second V^T)), in nats, over the whole
    vocabulary.

    first, second: hidden states [n, h]; head: W [v, h]; second_head: V, if it is not W. float32 logits, a chunk of
    positions at a time; float64 sum.
    """
    total = 0.0
    chunk = max(1, CHUNK_BYTES // (4 * len(head)))
    weight = head.float()
    second_weight = weight if second_head is None else second_head.float()
    for begin in range(0, len(first), chunk):
        p = nn.functional.linear(first[begin : begin + chunk].float(), weight).log_softmax(-1)
        q = nn.functional.linear(second[begin : begin + chunk].float(), second_weight).log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return max(0.0, total)


def limit_positions(sequences: Iterable[tuple[Tensor, Tensor]], positions: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (token ids, indices of the trained tokens) until `positions` trained tokens are reached; at least one
    sequence."""
    for token_ids, index in sequences:
        yield token_ids, index
        positions -= len(index)
        if positions <= 0:
            return
