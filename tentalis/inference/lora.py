"""PEFT LoRA adapters, applied unmerged to the rows of a batch; rows of one batch may use different adapters.

y = x W^T + scaling * (x A^T) B^T in fp32 for any dtype of the base, as PEFT computes in training.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.storage.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_WEIGHT_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
# PEFT options that this server does not support -> the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "target_parameters": ([], None),
    "trainable_token_indices": (None,),
}


class AdapterRefused(Exception):
    """The adapter folder is missing or does not fit this model; the message says why."""


class AdapterMissing(AdapterRefused):
    """There is no adapter folder at the path given."""


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A loaded adapter. Rows hold it by reference, so unloading its name does not affect requests in flight."""

    name: str
    path: str
    sha256: str
    rank: int
    # Module name -> (A^T [in, r], scaling * B^T [r, out]), fp32 on the model's device.
    weights: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)


def load_adapter(name: str, folder: Path, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> LoraAdapter:
    """Read a PEFT LoRA folder (adapter_config.json, adapter_model.safetensors).

    `shapes`: module name -> (in_features, out_features) of every linear layer an adapter may change. The result's
    `sha256` is that of the weight file as it was read. Raises AdapterMissing, AdapterRefused.
    """
    config, pairs, content = read_pairs(folder)
    weights = {
        module: _weights(module, sides, config, shapes, folder / ADAPTER_WEIGHTS, device)
        for module, sides in pairs.items()
    }
    rank = max(a.shape[1] for a, _ in weights.values())
    return LoraAdapter(name, str(folder), hashlib.sha256(content).hexdigest(), rank, weights)


def read_pairs(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], bytes]:
    """Reads a PEFT LoRA folder: its configuration; per module the matrices "A" [r, in] and "B" [out, r] that the file
    has; and the file's bytes. Raises AdapterMissing, AdapterRefused."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        content = (folder / ADAPTER_WEIGHTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterMissing(f"No adapter in {folder}: {error.filename} is missing.") from error
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"Cannot read the adapter in {folder}: {error}") from error
    _check_config(config, folder)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise AdapterRefused(f"{folder / ADAPTER_WEIGHTS} is not a safetensors file: {error}") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _WEIGHT_KEY.match(key)
        if match is None:
            raise AdapterRefused(f"{folder / ADAPTER_WEIGHTS}: {key!r} is not the LoRA weight of a linear layer.")
        if not torch.isfinite(tensor).all():
            raise AdapterRefused(
                f"{folder / ADAPTER_WEIGHTS}: {key!r} contains NaN or infinity. Use an earlier version."
            )
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise AdapterRefused(f"{folder / ADAPTER_WEIGHTS} holds no LoRA weights.")
    return config, pairs, content


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of a module's change: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterRefused(f"{folder}: peft_type is {config.get('peft_type')!r}; only LORA can be served.")
    for option, unused in _UNSUPPORTED.items():
        if option in config and config[option] not in unused:
            raise AdapterRefused(f"{folder}: the LoRA option {option}={config[option]!r} is not supported.")


def _weights(
    module: str,
    sides: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
    file: Path,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    if module not in shapes:
        raise AdapterRefused(f"{file}: this model has no linear layer {module!r}; the adapter is for another model.")
    if set(sides) != {"A", "B"}:
        raise AdapterRefused(f"{file}: {module!r} lacks lora_{'B' if 'A' in sides else 'A'}.")
    a, b = sides["A"].float(), sides["B"].float()
    size_in, size_out = shapes[module]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != size_in or b.shape != (size_out, a.shape[0]):
        raise AdapterRefused(
            f"{file}: {module!r} has A {tuple(a.shape)} and B {tuple(b.shape)}, but the layer maps {size_in} to "
            f"{size_out}; the adapter is for another model."
        )
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    if rank != a.shape[0]:
        raise AdapterRefused(f"{file}: {module!r} has rank {a.shape[0]}, {ADAPTER_CONFIG} says {rank}.")
    scaling = scaling_of(config, module, rank)
    return a.t().contiguous().to(device), (b.t() * scaling).contiguous().to(device)


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT's rule: the first pattern that the module's dotted name ends with, as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclass(frozen=True)
class AdapterRows:
    """Rows of the batch (its first dimension) that use one adapter, as a slice if they are contiguous."""

    adapter: LoraAdapter
    rows: Tensor | slice


class AdapterRouting:
    """Assigns adapters to the rows of the current forward pass. Owned by the engine's thread."""

    def __init__(self) -> None:
        self.groups: list[AdapterRows] = []

    def assign(self, adapters: Sequence[LoraAdapter | None], device: torch.device) -> None:
        """Set the adapters of the next pass: row i uses `adapters[i]`; None means the base model."""
        by_adapter: dict[LoraAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                by_adapter.setdefault(adapter, []).append(row)
        self.groups = [
            AdapterRows(
                adapter,
                slice(rows[0], rows[-1] + 1)
                if rows[-1] - rows[0] == len(rows) - 1
                else torch.tensor(rows, device=device),
            )
            for adapter, rows in by_adapter.items()
        ]


class RoutedLinear(nn.Module):
    """A linear layer of the base model plus, per row, the adapter that `routing` assigns to it.

    Where oneDNN is available (fp32 on a CPU), only its blocked layout of the weight is kept: two to three times as fast
    as the ordinary product on CPUs that MKL does not favour.
    """

    def __init__(self, name: str, linear: nn.Linear, routing: AdapterRouting, packed: bool) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._routing = routing
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        self._packed = packed
        self._weight: Tensor = self.hold(linear.weight.detach())

    @property
    def held(self) -> tuple[Tensor, Tensor | None]:
        """The weight as the layer holds it, and the bias."""
        return self._weight, self._bias

    def hold(self, weight: Tensor) -> Tensor:
        """Returns a weight [out, in] as the layer would hold it."""
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self._packed else weight

    def use(self, held: Tensor, bias: Tensor | None) -> None:
        """Replaces the weight, by one from `hold`, and the bias."""
        self._weight, self._bias = held, bias

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, ..., in] -> [rows, ..., out] in x's dtype."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = nn.functional.linear(x, self._weight, self._bias)
        for group in self._routing.groups:
            pair = group.adapter.weights.get(self.name)
            if pair is None:
                continue
            a, b = pair
            if isinstance(group.rows, slice) and y.dtype == torch.float32:
                flat = x[group.rows].reshape(-1, self.in_features)
                y[group.rows].view(-1, self.out_features).addmm_(flat @ a, b)
            elif isinstance(group.rows, slice):
                y[group.rows] += ((x[group.rows].float() @ a) @ b).to(y.dtype)
            else:
                selected = x.index_select(0, group.rows).float()
                changed = y.index_select(0, group.rows) + (selected @ a) @ b
                y.index_copy_(0, group.rows, changed.to(y.dtype))
        return y


# oneDNN chooses the blocked layout for this many rows; measured, it is as fast as any other for 1 to 512 rows.
_PACK_ROWS = 256


def can_pack(weight: Tensor) -> bool:
    """True if oneDNN can hold this weight in its blocked layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bool(torch._C._has_mkldnn)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
