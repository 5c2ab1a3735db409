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

from tentalis.service import Unmendable
from trainer import attention
from trainer.config import Lora
from trainer.flops import Shape
from trainer.frozen import Frozen
from trainer.logprobs import TokenScores, likeliest_ids, token_scores
from trainer.lora import lora_linear
from trainer.pack import Pack, Span

INITIALISER = "A: uniform(+-1/sqrt(in)) seeded by sha256(seed/name), B: 0 (v1)"
GIVEN = "the adapter in the folder that the configuration names"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


class UnsupportedModel(Unmendable):
    """A base model whose log-probs this trainer would get wrong."""


class BadAdapter(Unmendable):
    """An adapter that the run cannot go on from."""


class BadTargets(Unmendable):
    """`lora.targets` names what cannot be adapted."""


def read_adapter(folder: Path, lora: Lora) -> bytes:
    """The weights of the adapter in a folder in PEFT's format. Raises BadAdapter if it is none, or if the same weights
    would mean another update under `lora`: its scale depends on rank and alpha."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        weights = (folder / WEIGHTS_FILE).read_bytes()
    except (OSError, ValueError) as error:
        raise BadAdapter(f"initial_adapter: there is no adapter in {folder}: {error}") from error
    ours = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    ours |= dict.fromkeys(("use_dora", "use_rslora", "alpha_pattern", "rank_pattern"))
    for name, value in ours.items():
        if (config.get(name) or None) != value:
            expected = f"the run {value}" if value is not None else "the trainer does not know that"
            raise BadAdapter(f"initial_adapter: {folder} has {name} {config.get(name)}, {expected}")
    return weights


class Policy(nn.Module):
    """Packed micro-batches in, log-probs of the trained tokens out."""

    def __init__(
        self, folder: Path, base_name: str, lora: Lora, seed: int, device: str, base_dtype: torch.dtype
    ) -> None:
        """Loads the base model and puts a fresh adapter on it, the same for the same seed whatever the device.

        Raises UnsupportedModel, BadTargets.
        """
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        super().__init__()
        attention.register()
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=base_dtype, attn_implementation=attention.NAME)
        _check_supported(base)
        base.config.use_cache = False
        self.vocab_size = int(base.get_output_embeddings().weight.shape[0])
        targets = lora.targets if isinstance(lora.targets, str) else _layers_of(lora.targets, base)
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM"
        )
        self.lm = get_peft_model(base, config, autocast_adapter_dtype=True)
        self.lm.peft_config["default"].base_model_name_or_path = base_name
        self.backbone = base.get_decoder()
        self.rank = lora.rank
        self.draw(seed)
        self.to(device)
        self.train()
        self._device = device
        self._head = Frozen.of(base.get_output_embeddings().weight)
        _use_one_operation_per_layer(self.lm)

    def forward(self, batch: Pack, entropy_gradient: bool = False, likeliest: int = 0) -> TokenScores:
        """Log-probs and entropies of the trained tokens at their sampling temperatures.

        The entropies have a gradient only with `entropy_gradient`, which costs one more product with the head. With
        `likeliest` the tokens of the OPD part have candidates: that many likeliest tokens of the policy itself, then
        the teacher's, hint by hint; this costs another.
        """
        hidden = self.backbone(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            spans=batch.spans,
        ).last_hidden_state[0]
        picked, rows = hidden[batch.source], self.lm.get_output_embeddings().weight
        own = candidates = None
        if likeliest:
            own = torch.full((len(picked), likeliest), -1, device=picked.device)
            taught = batch.signal.in_opd
            own[taught] = likeliest_ids(picked.detach()[taught], self._head, len(rows), likeliest)
            candidates = torch.cat([own, batch.signal.teacher_ids.flatten(1)], 1)
        scores = token_scores(
            picked,
            self._head,
            rows,
            batch.targets,
            batch.temperatures,
            candidates,
            entropy_gradient=entropy_gradient,
        )
        return scores._replace(likeliest=own)

    @torch.no_grad()
    def base_logprobs(self, batch: Pack) -> Tensor:
        """The log-probs of the trained tokens by the base model, without the adapter, float32 [m]."""
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

    def checkpoint_layers(self) -> None:
        """From now on only each layer's input is kept for the backward pass, and the layer computed again in it."""
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def shape(self) -> Shape:
        """What its floating point operations follow from."""
        from peft.tuners.lora import Linear

        config = self.lm.config
        layers = [module.base_layer for module in self.lm.modules() if isinstance(module, Linear)]
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Shape(
            body=sum(layer.in_features * layer.out_features for layer in layers),
            head=self.vocab_size * config.hidden_size,
            adapter=sum(parameter.numel() for _, parameter in self.adapter_parameters()),
            layers=config.num_hidden_layers,
            width=config.num_attention_heads * head_size,
        )

    def adapter_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters by the names that PEFT gives them in files, sorted by name."""
        named = ((n.replace(".default.", "."), p) for n, p in self.lm.named_parameters() if p.requires_grad)
        return sorted(named, key=lambda item: item[0])

    def adapter_bytes(self) -> bytes:
        """The adapter as the content of adapter_model.safetensors: sorted names, no metadata that varies."""
        from safetensors.torch import save

        tensors = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in self.adapter_parameters()}
        data: bytes = save(tensors, metadata={"format": "pt"})
        return data

    def adapter_config(self) -> bytes:
        """The content of adapter_config.json."""
        config = self.lm.peft_config["default"].to_dict() | {"inference_mode": True}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        return (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()

    def draw(self, seed: int) -> None:
        """Sets the adapter to that of a seed: the policy is the base model then."""
        for name, parameter in self.adapter_parameters():
            _initialise(name, parameter, seed)

    def load_adapter(self, data: bytes) -> None:
        """Sets the adapter to what `adapter_bytes` returned. Raises ValueError if it belongs to another shape."""
        from safetensors.torch import load

        tensors = load(data)
        own = dict(self.adapter_parameters())
        if tensors.keys() != own.keys() or any(tensors[name].shape != p.shape for name, p in own.items()):
            raise ValueError(
                "the saved adapter has other layers or another rank than the configuration asks for: `lora` and "
                "`base_model` cannot change within a run, nor between a run and the adapter it goes on from"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])

    @torch.no_grad()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """The last hidden states of one sequence: int64 [n] -> [n, hidden size]."""
        n = len(token_ids)
        result: Tensor = self.backbone(
            input_ids=token_ids.to(self._device).unsqueeze(0),
            position_ids=torch.arange(n, device=self._device).unsqueeze(0),
            use_cache=False,
            spans=(Span(0, n, 0, 0),),
        ).last_hidden_state[0]
        return result

    @torch.no_grad()
    def score(self, token_ids: Tensor) -> Tensor:
        """log p(token | those before it) at temperature 1, float32 [n] on the CPU; the first, which has no prefix, is
        0."""
        token_ids = token_ids.to(self._device)
        hidden = self.hidden(token_ids)
        rows, at_one = self.lm.get_output_embeddings().weight, torch.ones(len(hidden) - 1, device=self._device)
        scores = token_scores(hidden[:-1], self._head, rows, token_ids[1:], at_one)
        return torch.cat((torch.zeros(1), scores.logprobs.cpu()))


def canary_tokens(vocab_size: int, n: int = 24) -> Tensor:
    """int64 [n]: a fixed sequence of token ids, the same for every model with that vocabulary."""
    return torch.tensor([(104_729 * (i + 1)) % vocab_size for i in range(n)])


def adapter_sha256(data: bytes) -> str:
    """sha256 (hex) of adapter_model.safetensors."""
    return hashlib.sha256(data).hexdigest()


def _initialise(name: str, parameter: nn.Parameter, seed: int) -> None:
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
        raise UnsupportedModel("the model's head has a bias, which the chunked log-probs do not know")
    for option in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, option, None):
            raise UnsupportedModel(f"the model uses {option}, which the packed attention and log-probs do not know")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel("the model has sliding-window layers, which the packed attention does not know")


def _layers_of(targets: Sequence[str], base: Any) -> list[str]:
    """The targets, each the last names of linear layers and of nothing else. Raises BadTargets."""
    modules = dict(base.named_modules())
    head = base.get_output_embeddings()
    layers = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    for target in targets:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        if named and layers.issuperset(named):
            continue
        what = "names no linear layer of this model"
        if any(modules[name] is head for name in named):
            what = "is the model's head, which stays frozen: log-probs are computed from its own weights, in chunks"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise BadTargets(f"lora.targets: {target} {what}. Name some of {known}, or say all-linear")
    return list(targets)


def _use_one_operation_per_layer(model: nn.Module) -> None:
    """PEFT keeps the structure, the names and the files; its forward pass is replaced by the fused one."""
    from peft.tuners.lora import Linear

    def forward(layer: Any, x: Tensor) -> Tensor:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return lora_linear(x, layer.frozen, a, b, layer.scaling["default"])

    for module in model.modules():
        if isinstance(module, Linear):
            base = module.base_layer
            module.frozen = Frozen.of(base.weight, base.bias)
            if module.frozen.packed:
                base.weight = nn.Parameter(base.weight.new_empty(0), requires_grad=False)
            module.forward = MethodType(forward, module)
