"""The policy: a frozen base model with a LoRA adapter, and the adapter's bytes."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.service.lifecycle import Unmendable
from trainer.config.trainer_config import LoraShape
from trainer.data.pack import PackedBatch, PackedSpan
from trainer.model import attention
from trainer.model.flops import ModelShape
from trainer.model.logprobs import TokenScores, token_scores, top_k_ids
from trainer.model.lora import lora_linear
from trainer.model.packed_linear import PackedLinear

SEEDED_INITIALISER = "A: uniform(+-1/sqrt(in)) seeded by sha256(seed/name), B: 0 (v1)"
GIVEN_ADAPTER = "the adapter in the folder that the configuration names"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
UNSUPPORTED = "with which this trainer would compute wrong log-probs: choose another base_model"


class UntrainableModel(Unmendable):
    """The base model has a feature with which this trainer would compute wrong log-probs."""


class BadAdapter(Unmendable):
    """The initial adapter is unreadable or does not match `lora`."""


class BadTargets(Unmendable):
    """`lora.targets` names a module that cannot be adapted."""


def read_adapter(folder: Path, lora: LoraShape) -> bytes:
    """Returns the weights of the adapter in a folder in PEFT's format. Raises BadAdapter if the folder holds no
    adapter, or if the same weights would mean another update under `lora`: its scale depends on rank and alpha."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        weights = (folder / WEIGHTS_FILE).read_bytes()
    except (OSError, ValueError) as error:
        raise BadAdapter(f"initial_adapter: no adapter in {folder}: {error}") from error
    required = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    required |= dict.fromkeys(("use_dora", "use_rslora", "alpha_pattern", "rank_pattern"))
    for name, value in required.items():
        if (config.get(name) or None) != value:
            expected = f"but the run has {value}" if value is not None else "which the trainer does not support"
            raise BadAdapter(f"initial_adapter: {folder} has {name} {config.get(name)}, {expected}")
    return weights


class LoraPolicy(nn.Module):
    """The model that is trained. Input: packed micro-batches; output: log-probs of the trained tokens."""

    def __init__(
        self, folder: Path, base_name: str, lora: LoraShape, seed: int, device: str, base_dtype: torch.dtype
    ) -> None:
        """Loads the base model and adds a fresh adapter; the same seed gives the same adapter on every device.

        Raises UntrainableModel, BadTargets.
        """
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        super().__init__()
        attention.register()
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=base_dtype, attn_implementation=attention.ATTENTION_NAME
        )
        _check_supported(base)
        base.config.use_cache = False
        self.vocab_size = int(base.get_output_embeddings().weight.shape[0])
        targets = lora.targets if isinstance(lora.targets, str) else _checked_targets(lora.targets, base)
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM"
        )
        self.lm = get_peft_model(base, config, autocast_adapter_dtype=True)
        self.lm.peft_config["default"].base_model_name_or_path = base_name
        self.backbone = base.get_decoder()
        self.rank = lora.rank
        self.initialise_adapter(seed)
        self.to(device)
        self.train()
        self._device = device
        self._head = PackedLinear.of(base.get_output_embeddings().weight)
        _fuse_lora_layers(self.lm)

    def forward(self, batch: PackedBatch, entropy_gradient: bool = False, n_likeliest: int = 0) -> TokenScores:
        """Returns log-probs and entropies of the trained tokens at their sampling temperatures.

        The entropies have a gradient only with `entropy_gradient`, which costs one more product with the head. With
        `n_likeliest` > 0 the tokens of the OPD part also get candidates: the `n_likeliest` most likely tokens of the
        policy itself, then the teacher's, hint by hint. This costs one more product with the head, too.
        """
        hidden = self.backbone(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            spans=batch.spans,
        ).last_hidden_state[0]
        predicting, head_weight = hidden[batch.source], self.lm.get_output_embeddings().weight
        student_ids = candidates = None
        if n_likeliest:
            student_ids = torch.full((len(predicting), n_likeliest), -1, device=predicting.device)
            in_opd = batch.token_targets.in_opd
            student_ids[in_opd] = top_k_ids(predicting.detach()[in_opd], self._head, len(head_weight), n_likeliest)
            candidates = torch.cat([student_ids, batch.token_targets.teacher_ids.flatten(1)], 1)
        scores = token_scores(
            predicting,
            self._head,
            head_weight,
            batch.targets,
            batch.temperatures,
            candidates,
            entropy_gradient=entropy_gradient,
        )
        return scores._replace(likeliest=student_ids)

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

    def enable_gradient_checkpointing(self) -> None:
        """Turns on gradient checkpointing: only each layer's input is kept, and the backward pass recomputes the
        layer."""
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def shape(self) -> ModelShape:
        """The sizes that determine the number of floating point operations."""
        from peft.tuners.lora import Linear

        config = self.lm.config
        layers = [module.base_layer for module in self.lm.modules() if isinstance(module, Linear)]
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelShape(
            body=sum(layer.in_features * layer.out_features for layer in layers),
            head=self.vocab_size * config.hidden_size,
            adapter=sum(parameter.numel() for _, parameter in self.adapter_parameters()),
            layers=config.num_hidden_layers,
            width=config.num_attention_heads * head_size,
        )

    def adapter_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters by the names that PEFT gives them in files, sorted by name."""
        named = (
            (name.replace(".default.", "."), parameter)
            for name, parameter in self.lm.named_parameters()
            if parameter.requires_grad
        )
        return sorted(named, key=lambda item: item[0])

    def adapter_bytes(self) -> bytes:
        """The adapter as the content of adapter_model.safetensors: sorted names, constant metadata."""
        from safetensors.torch import save

        tensors = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in self.adapter_parameters()}
        data: bytes = save(tensors, metadata={"format": "pt"})
        return data

    def adapter_config(self) -> bytes:
        """The content of adapter_config.json."""
        config = self.lm.peft_config["default"].to_dict() | {"inference_mode": True}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        return (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()

    def initialise_adapter(self, seed: int) -> None:
        """Resets the adapter to the initial one of a seed; the policy then equals the base model."""
        for name, parameter in self.adapter_parameters():
            _initialise_parameter(name, parameter, seed)

    def load_adapter(self, data: bytes) -> None:
        """Loads the bytes that `adapter_bytes` returned. Raises ValueError if the shapes differ."""
        from safetensors.torch import load

        tensors = load(data)
        own = dict(self.adapter_parameters())
        if tensors.keys() != own.keys() or any(tensors[name].shape != p.shape for name, p in own.items()):
            raise ValueError(
                "the saved adapter has other layers or another rank than the configuration: `lora` and `base_model` "
                "cannot change within a run, nor between a run and the adapter that it starts from"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])

    @torch.no_grad()
    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Returns the last hidden states of one sequence: int64 [n] -> [n, hidden size]."""
        n = len(token_ids)
        result: Tensor = self.backbone(
            input_ids=token_ids.to(self._device).unsqueeze(0),
            position_ids=torch.arange(n, device=self._device).unsqueeze(0),
            use_cache=False,
            spans=(PackedSpan(0, n, 0, 0),),
        ).last_hidden_state[0]
        return result

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor) -> Tensor:
        """Returns log p(token | prefix) at temperature 1, float32 [n] on the CPU. The first token has no prefix; its
        entry is 0."""
        token_ids = token_ids.to(self._device)
        hidden = self.hidden_states(token_ids)
        head_weight, temperatures = (
            self.lm.get_output_embeddings().weight,
            torch.ones(len(hidden) - 1, device=self._device),
        )
        scores = token_scores(hidden[:-1], self._head, head_weight, token_ids[1:], temperatures)
        return torch.cat((torch.zeros(1), scores.logprobs.cpu()))


def canary_tokens(vocab_size: int, n: int = 24) -> Tensor:
    """Returns int64 [n]: a fixed sequence of token ids, the same for every model with that vocabulary."""
    return torch.tensor([(104_729 * (i + 1)) % vocab_size for i in range(n)])


def adapter_sha256(data: bytes) -> str:
    """sha256 (hex) of adapter_model.safetensors."""
    return hashlib.sha256(data).hexdigest()


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


def _check_supported(base: Any) -> None:
    config = base.config
    head = base.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UntrainableModel(f"the model's output layer (lm_head) has a bias, {UNSUPPORTED}")
    for option in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, option, None):
            raise UntrainableModel(f"the model's config.json sets {option}, {UNSUPPORTED}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UntrainableModel(f"the model has layers with sliding-window attention, {UNSUPPORTED}")


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


def _fuse_lora_layers(model: nn.Module) -> None:
    """Replaces PEFT's forward pass with the fused one; structure, names and files stay PEFT's."""
    from peft.tuners.lora import Linear

    def forward(layer: Any, x: Tensor) -> Tensor:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return lora_linear(x, layer.frozen, a, b, layer.scaling["default"])

    for module in model.modules():
        if isinstance(module, Linear):
            base = module.base_layer
            module.frozen = PackedLinear.of(base.weight, base.bias)
            if module.frozen.packed:
                base.weight = nn.Parameter(base.weight.new_empty(0), requires_grad=False)
            module.forward = MethodType(forward, module)
