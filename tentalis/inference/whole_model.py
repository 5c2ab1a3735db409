"""Versions that are whole models of the served model's shape: held beside it, and swapped in between forward passes.

All rows of one forward pass have the same weights: the engine runs one pass per model that its rows need. A swap sets
references and copies nothing, so every held model has its memory.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.inference.lora import AdapterMissing, AdapterRefused, LoraAdapter, RoutedLinear
from tentalis.storage.version_files import ADAPTER_CONFIG, MODEL_CONFIG, MODEL_WEIGHTS

# Settings of config.json that do not change what the weights mean.
_FREE_SETTINGS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True)
class HeldWeights:
    """The weights of a model as its modules hold them: of linear layers (weight, bias) by name, and the parameters of
    all other modules by name."""

    linears: Mapping[str, tuple[Tensor, Tensor | None]] = field(repr=False)
    parameters: Mapping[str, nn.Parameter] = field(repr=False)


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A loaded whole model. Rows hold it by reference, so unloading its name does not affect requests in flight."""

    name: str
    path: str
    sha256: str
    weights: HeldWeights = field(repr=False)


ServedVersion = LoraAdapter | WholeModel


class ModelSlots:
    """The places of a model's weights. `swap` fills them with those of a whole model, or with the model's own."""

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the names and shapes of a model as it was loaded, before its linear layers are replaced."""
        self._dtype, self._device = dtype, device
        self._settings = _settings(folder)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        head = model.get_output_embeddings()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # The name of the embeddings, if the two are tied.
        self._head_name = names[id(head.weight)]
        self._linears: dict[str, RoutedLinear] = {}
        self._head: RoutedLinear | None = None
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._own = HeldWeights({}, {})
        self._active: WholeModel | None = None

    def fill(self, model: Any, linears: Mapping[str, RoutedLinear], head: RoutedLinear) -> None:
        """Takes over a model whose linear layers are replaced, with its head."""
        self._linears, self._head = dict(linears), head
        for name, _ in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            self._owners[name] = model.get_submodule(module), leaf
        self._own = HeldWeights(
            {"": head.held, **{name: linear.held for name, linear in linears.items()}},
            dict(model.named_parameters()),
        )

    def load(self, name: str, folder: Path) -> WholeModel:
        """Reads a model folder; its `sha256` is that of the weight file as it was read. Raises AdapterMissing,
        AdapterRefused."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = folder / MODEL_WEIGHTS
        try:
            settings, content = _settings(folder), file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AdapterMissing(f"No model in {folder}: {error.filename} is missing.") from error
        except (OSError, ValueError) as error:
            raise AdapterRefused(f"Cannot read the model in {folder}: {error}") from error
        differing = sorted(key for key in {*settings, *self._settings} if settings.get(key) != self._settings.get(key))
        if differing:
            raise AdapterRefused(
                f"{folder / MODEL_CONFIG} differs from that of the served model in {', '.join(differing)}; the version "
                "is of another model."
            )
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise AdapterRefused(f"{file} is not a safetensors file: {error}") from error
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        if shapes != self._shapes:
            wrong = min(key for key in {*shapes, *self._shapes} if shapes.get(key) != self._shapes.get(key))
            raise AdapterRefused(
                f"{file}: {wrong!r} has the shape {shapes.get(wrong)}, in the served model {self._shapes.get(wrong)}; "
                "the version is of another model."
            )
        for key, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise AdapterRefused(f"{file}: {key!r} contains NaN or infinity. Use an earlier version.")
        return WholeModel(name, str(folder), hashlib.sha256(content).hexdigest(), self._held(tensors))

    def _held(self, tensors: Mapping[str, Tensor]) -> HeldWeights:
        assert self._head is not None
        here = {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}
        linears = {
            name: (linear.hold(here[f"{name}.weight"]), here.get(f"{name}.bias"))
            for name, linear in self._linears.items()
        }
        linears[""] = self._head.hold(here[self._head_name]), None
        parameters = {name: nn.Parameter(here[name], requires_grad=False) for name in self._owners}
        return HeldWeights(linears, parameters)

    def swap(self, version: WholeModel | None) -> None:
        """Makes the next forward passes use the weights of a version, or of the served model itself."""
        if version is self._active:
            return
        weights = self._own if version is None else version.weights
        assert self._head is not None
        self._head.use(*weights.linears[""])
        for name, linear in self._linears.items():
            linear.use(*weights.linears[name])
        for name, (module, leaf) in self._owners.items():
            module._parameters[leaf] = weights.parameters[name]
        self._active = version


def whole_model_of(version: ServedVersion | None) -> WholeModel | None:
    """Returns the whole model that computes a row: None for the served model, with or without an adapter."""
    return version if isinstance(version, WholeModel) else None


def is_whole_model(folder: Path) -> bool:
    """True if a folder holds a whole model, not an adapter."""
    return (folder / MODEL_WEIGHTS).is_file() and not (folder / ADAPTER_CONFIG).exists()


def _settings(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / MODEL_CONFIG).read_bytes())
    return {key: value for key, value in settings.items() if key not in _FREE_SETTINGS}
