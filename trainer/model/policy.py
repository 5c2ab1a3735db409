"""The policy that is trained: what a model with an adapter and a fully trained model have in common."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tentalis.service.imports import without_collections
from tentalis.service.lifecycle import Unmendable
from trainer.data.pack import PackedBatch, PackedSpan, layout_for
from trainer.model import attention
from trainer.model.flops import ModelShape
from trainer.model.logprobs import TokenScores, top_k_ids
from trainer.model.packed_linear import PackedLinear

UNSUPPORTED = "with which this trainer would compute wrong log-probs: choose another base_model"


class UntrainableModel(Unmendable):
    """The base model has a feature with which this trainer would compute wrong log-probs."""


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of a version: the name of the file with its weights, and the content of the others by name."""

    weights: str
    others: Mapping[str, bytes]


class TrainedPolicy(nn.Module, ABC):
    """A causal language model, some or all of whose parameters are trained. Input: packed micro-batches; output:
    log-probs of the trained tokens.

    `rank`: the adapter's, 0 if all parameters are trained.
    """

    lm: Any
    backbone: Any
    vocab_size: int
    rank: int
    _device: str

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Resets the trained parameters to those with which a run begins."""

    @abstractmethod
    def base_logprobs(self, batch: PackedBatch) -> Tensor:
        """Returns the log-probs of the trained tokens by the base model, float32 [m]."""

    @abstractmethod
    def files(self) -> VersionFiles:
        """Returns the files of a version besides its weights."""

    @abstractmethod
    def shape(self) -> ModelShape:
        """The sizes that determine the number of floating point operations."""

    @abstractmethod
    def _token_scores(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, candidates: Tensor | None, entropy_gradient: bool
    ) -> TokenScores:
        """Returns the scores of tokens after hidden states [m, h]."""

    @abstractmethod
    def _head_products(self) -> PackedLinear:
        """Returns the products with the head as it is now, without gradients."""

    def forward(self, batch: PackedBatch, entropy_gradient: bool = False, n_likeliest: int = 0) -> TokenScores:
        """Returns log-probs and entropies of the trained tokens at their sampling temperatures.

        The entropies have a gradient only with `entropy_gradient`, which costs one more product with the head. With
        `n_likeliest` > 0 the tokens of the OPD part also get candidates: the `n_likeliest` most likely tokens of the
        policy itself, then the teacher's, hint by hint. This costs one more product with the head, too.
        """
        predicting = predicting_states(self.backbone, batch)
        student_ids = candidates = None
        if n_likeliest:
            student_ids = torch.full((len(predicting), n_likeliest), -1, device=predicting.device)
            in_opd = batch.token_targets.opd_indices
            student_ids[in_opd] = top_k_ids(
                predicting.detach()[in_opd], self._head_products(), self.vocab_size, n_likeliest
            )
            candidates = torch.cat([student_ids, batch.token_targets.teacher_ids.flatten(1)], 1)
        scores = self._token_scores(predicting, batch.targets, batch.temperatures, candidates, entropy_gradient)
        return scores._replace(likeliest=student_ids)

    def enable_gradient_checkpointing(self) -> None:
        """Turns on gradient checkpointing: only each layer's input is kept, and the backward pass recomputes the
        layer."""
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters by their names in files, sorted by name."""
        named = (
            (self._file_name(name), parameter)
            for name, parameter in self.lm.named_parameters()
            if parameter.requires_grad
        )
        return sorted(named, key=lambda item: item[0])

    def _file_name(self, name: str) -> str:
        """Returns the name of a parameter of `lm` in files."""
        return name

    def weights_bytes(self) -> bytes:
        """The trained parameters as the content of the version's safetensors file."""
        return weights_file({name: p.detach().to("cpu", torch.float32) for name, p in self.trained_parameters()})

    def weights_copy(self) -> dict[str, Tensor]:
        """Returns a copy of the trained parameters on the CPU, which no later step changes."""
        return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in self.trained_parameters()}

    def load_weights(self, data: bytes) -> None:
        """Loads the bytes that `weights_bytes` returned. Raises ValueError if names or shapes differ."""
        from safetensors.torch import load

        self._load_tensors(load(data))

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.trained_parameters())
        if tensors.keys() != own.keys() or any(tensors[name].shape != p.shape for name, p in own.items()):
            raise ValueError(
                "the saved weights have other layers or another rank than the configuration: `lora` and `base_model` "
                "cannot change within a run, nor between a run and the version that it starts from"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])

    @torch.no_grad()
    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Returns the last hidden states of one sequence: int64 [n] -> [n, hidden size]."""
        n = len(token_ids)
        spans = (PackedSpan(0, n, 0, 0),)
        result: Tensor = self.backbone(
            input_ids=token_ids.to(self._device).unsqueeze(0),
            position_ids=torch.arange(n, device=self._device).unsqueeze(0),
            use_cache=False,
            spans=spans,
            layout=layout_for(spans, self._device),
        ).last_hidden_state[0]
        return result

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor) -> Tensor:
        """Returns log p(token | prefix) at temperature 1, float32 [n] on the CPU. The first token has no prefix; its
        entry is 0."""
        token_ids = token_ids.to(self._device)
        hidden = self.hidden_states(token_ids)
        temperatures = torch.ones(len(hidden) - 1, device=self._device)
        scores = self._token_scores(hidden[:-1], token_ids[1:], temperatures, None, False)
        return torch.cat((torch.zeros(1), scores.logprobs.cpu()))


def predicting_states(backbone: Any, batch: PackedBatch) -> Tensor:
    """Returns the last hidden states after which the trained tokens come, [m, hidden size]."""
    hidden: Tensor = backbone(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        use_cache=False,
        spans=batch.spans,
        layout=batch.layout,
    ).last_hidden_state[0]
    return hidden[batch.source]


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the model in a folder, with the attention of packed micro-batches. Raises UntrainableModel."""
    with without_collections():
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.ATTENTION_NAME)
    _check_supported(model)
    model.config.use_cache = False
    return model


def canary_tokens(vocab_size: int, n: int = 24) -> Tensor:
    """Returns int64 [n]: a fixed sequence of token ids, the same for every model with that vocabulary."""
    return torch.tensor([(104_729 * (i + 1)) % vocab_size for i in range(n)])


def weights_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns a safetensors file of tensors on the CPU: sorted names, constant metadata."""
    from safetensors.torch import save

    contiguous = {name: tensors[name].contiguous() for name in sorted(tensors)}
    data: bytes = save(contiguous, metadata={"format": "pt"})
    return data


def adapter_sha256(data: bytes) -> str:
    """sha256 (hex) of a version's safetensors file, an adapter's or a whole model's."""
    return hashlib.sha256(data).hexdigest()


def _check_supported(base: Any) -> None:
    """Raises UntrainableModel for a model with whose features the log-probs would be wrong."""
    config = base.config
    head = base.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UntrainableModel(f"the model's output layer (lm_head) has a bias, {UNSUPPORTED}")
    for option in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, option, None):
            raise UntrainableModel(f"the model's config.json sets {option}, {UNSUPPORTED}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UntrainableModel(f"the model has layers with sliding-window attention, {UNSUPPORTED}")
