"""A policy with an adapter: a frozen base model and a trained LoRA adapter."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.service.imports import without_collections
from tentalis.service.lifecycle import Unmendable
from tentalis.storage.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.config.trainer_config import LoraShape
from trainer.data.pack import PackedBatch
from trainer.model.flops import ModelShape, attention_width
from trainer.model.fused import fuse_elementwise
from trainer.model.logprobs import TokenScores, token_scores
from trainer.model.lora import lora_linear
from trainer.model.packed_linear import PackedLinear
from trainer.model.policy import TrainedPolicy, VersionFiles, load_model

SEEDED_INITIALISER = "A: uniform(+-1/sqrt(in)) seeded by sha256(seed/name), B: 0 (v1)"
GIVEN_ADAPTER = "the adapter in the folder that the configuration names"


class BadAdapter(Unmendable):
    """The initial adapter is unreadable or does not match `lora`."""


class BadTargets(Unmendable):
    """`lora.targets` names a module that cannot be adapted."""


def read_adapter(folder: Path, lora: LoraShape) -> bytes:
    """Returns the weights of the adapter in a folder in PEFT's format. Raises BadAdapter if the folder holds no
    adapter, or if the same weights would mean another update under `lora`: its scale depends on rank and alpha."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        weights = (folder / ADAPTER_WEIGHTS).read_bytes()
    except (OSError, ValueError) as error:
        raise BadAdapter(
            f"initial_adapter: no adapter in {folder}: {error}. Give the folder of a version, or of another adapter in "
            "PEFT's format"
        ) from error
    required = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    required |= dict.fromkeys(("use_dora", "use_rslora", "alpha_pattern", "rank_pattern"))
    for name, value in required.items():
        if (config.get(name) or None) != value:
            expected = f"but the run has {value}" if value is not None else "which the trainer does not support"
            raise BadAdapter(f"initial_adapter: {folder} has {name} {config.get(name)}, {expected}")
    return weights


class LoraPolicy(TrainedPolicy):
    """A frozen base model with a LoRA adapter, which is trained."""

    def __init__(
        self, folder: Path, base_name: str, lora: LoraShape, seed: int, device: str, base_dtype: torch.dtype
    ) -> None:
        """Loads the base model and adds a fresh adapter; the same seed gives the same adapter on every device.

        Raises UntrainableModel, BadTargets.
        """
        with without_collections():
            from peft import LoraConfig, get_peft_model

        super().__init__()
        base = load_model(folder, base_dtype)
        self.vocab_size = int(base.get_output_embeddings().weight.shape[0])
        targets = lora.targets if isinstance(lora.targets, str) else _checked_targets(lora.targets, base)
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM"
        )
        self.lm = get_peft_model(base, config, autocast_adapter_dtype=True)
        self.lm.peft_config["default"].base_model_name_or_path = base_name
        self.backbone = base.get_decoder()
        self.rank = lora.rank
        self.initialise(seed)
        self.to(device)
        self.train()
        self._device = device
        self._head = PackedLinear.of(base.get_output_embeddings().weight)
        _fuse_lora_layers(self.lm, narrow=device == "cuda")
        if device == "cuda":
            fuse_elementwise(self.backbone)

    @torch.no_grad()
    def base_logprobs(self, batch: PackedBatch) -> Tensor:
        """Returns the log-probs of the trained tokens by the base model, without the adapter, float32 [m]."""
        from peft.tuners.lora import Linear

        layers: list[Any] = [module for module in self.lm.modules() if isinstance(module, Linear)]
        scalings = [layer.scaling["default"] for layer in layers]
        try:
            for layer in layers:
                layer.scaling["default"] = 0.0
            return self.forward(batch).logprobs
        finally:
            for layer, scaling in zip(layers, scalings, strict=True):
                layer.scaling["default"] = scaling

    def shape(self) -> ModelShape:
        """The sizes that determine the number of floating point operations."""
        from peft.tuners.lora import Linear

        config = self.lm.config
        layers = [module.base_layer for module in self.lm.modules() if isinstance(module, Linear)]
        return ModelShape(
            body=sum(layer.in_features * layer.out_features for layer in layers),
            head=self.vocab_size * config.hidden_size,
            adapter=sum(parameter.numel() for _, parameter in self.trained_parameters()),
            layers=config.num_hidden_layers,
            width=attention_width(config),
        )

    def _file_name(self, name: str) -> str:
        """Returns the name that PEFT gives to a parameter in files."""
        return name.replace(".default.", ".")

    def files(self) -> VersionFiles:
        """Returns adapter_config.json."""
        config = self.lm.peft_config["default"].to_dict() | {"inference_mode": True}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        text = json.dumps(plain, indent=2, sort_keys=True) + "\n"
        return VersionFiles(ADAPTER_WEIGHTS, {ADAPTER_CONFIG: text.encode()})

    def initialise(self, seed: int) -> None:
        """Resets the adapter to the initial one of a seed; the policy then equals the base model."""
        for name, parameter in self.trained_parameters():
            _initialise_parameter(name, parameter, seed)

    def _token_scores(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, candidates: Tensor | None, entropy_gradient: bool
    ) -> TokenScores:
        head_weight = self.lm.get_output_embeddings().weight
        return token_scores(
            hidden, self._head, head_weight, targets, temperatures, candidates, entropy_gradient=entropy_gradient
        )

    def _head_products(self) -> PackedLinear:
        return self._head


def _initialise_parameter(name: str, parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        if ".lora_B." in name:
            parameter.zero_()
            return
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
        )
        bound = 1.0 / math.sqrt(parameter.shape[1])
        drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(drawn.mul_(2 * bound).sub_(bound))


def _checked_targets(targets: Sequence[str], base: Any) -> list[str]:
    """Returns the targets. Raises BadTargets unless each is the last name of linear layers only."""
    modules = dict(base.named_modules())
    head = base.get_output_embeddings()
    layers = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    for target in targets:
        matching = [name for name in modules if name == target or name.endswith(f".{target}")]
        if matching and layers.issuperset(matching):
            continue
        problem = "names no linear layer of this model"
        if any(modules[name] is head for name in matching):
            problem = "is the model's head, which stays frozen: the chunked log-probs use the frozen weights"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise BadTargets(f"lora.targets: {target} {problem}. Name some of {known}, or set all-linear")
    return list(targets)


def _fuse_lora_layers(model: nn.Module, narrow: bool) -> None:
    """Replaces PEFT's forward pass with the fused one (see lora.py); structure, names and files stay PEFT's."""
    from peft.tuners.lora import Linear

    def forward(layer: Any, x: Tensor) -> Tensor:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return lora_linear(x, layer.frozen, a, b, layer.scaling["default"], narrow=narrow)

    for module in model.modules():
        if isinstance(module, Linear):
            base = module.base_layer
            module.frozen = PackedLinear.of(base.weight, base.bias)
            if module.frozen.packed:
                base.weight = nn.Parameter(base.weight.new_empty(0), requires_grad=False)
            module.forward = MethodType(forward, module)
