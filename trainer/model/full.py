"""A fully trained policy: every parameter of the model is trained, in float32."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tentalis.inference.models import companion_files
from tentalis.storage.version_files import MODEL_CONFIG, MODEL_WEIGHTS
from trainer.data.pack import PackedBatch
from trainer.model.flops import ModelShape, attention_width
from trainer.model.fused import fuse_elementwise
from trainer.model.logprobs import TokenScores, token_scores
from trainer.model.packed_linear import PackedLinear
from trainer.model.policy import (
    UNSUPPORTED,
    TrainedPolicy,
    UntrainableModel,
    VersionFiles,
    load_model,
    predicting_states,
)
from trainer.model.trained_head import trained_head_scores

BASE_INITIALISER = "the weights of the base model in float32 (v1)"
_DTYPE_KEYS = ("dtype", "torch_dtype")


class FullPolicy(TrainedPolicy):
    """A model whose parameters are all trained. A version is a whole model folder: weights, config.json, tokenizer.

    `folder` must stay as it is: `initialise` reads it again.
    """

    def __init__(self, folder: Path, device: str, *, with_base: bool) -> None:
        """Loads the model in float32. `with_base`: also keeps the base model as it is, frozen, for `base_logprobs`.
        Raises UntrainableModel."""
        super().__init__()
        self.lm = load_model(folder, torch.float32)
        self.backbone = self.lm.get_decoder()
        self.vocab_size = int(self.lm.get_output_embeddings().weight.shape[0])
        self.rank = 0
        self.lm.requires_grad_(True)
        saved = {name for name, _ in self.lm.named_buffers()} & self.lm.state_dict().keys()
        if saved:
            raise UntrainableModel(f"the model's files have buffers besides its weights ({min(saved)}), {UNSUPPORTED}")
        self._folder = folder
        self._files = _version_files(folder)
        self._device = device
        self.to(device)
        self.train()
        if device == "cuda":
            fuse_elementwise(self.backbone)
        # In a tuple, so that torch does not take it for a part of this module.
        self._base: tuple[_FrozenBase, ...] = tuple(_FrozenBase(folder, device) for _ in range(with_base))

    def initialise(self, seed: int) -> None:
        """Resets all parameters to those of the base model, whatever the seed."""
        fresh = load_model(self._folder, torch.float32)
        self._load_tensors(dict(fresh.named_parameters()))

    @torch.no_grad()
    def base_logprobs(self, batch: PackedBatch) -> Tensor:
        """Returns the log-probs of the trained tokens by the base model, float32 [m]."""
        (base,) = self._base
        return base.logprobs(batch)

    def files(self) -> VersionFiles:
        """Returns config.json, which names float32, and the files of the tokenizer and of the generation settings."""
        return self._files

    def shape(self) -> ModelShape:
        """The sizes that determine the number of floating point operations."""
        head = self.lm.get_output_embeddings()
        layers = [each for each in self.lm.modules() if isinstance(each, torch.nn.Linear) and each is not head]
        config = self.lm.config
        return ModelShape(
            body=0,
            head=0,
            adapter=sum(layer.weight.numel() for layer in layers),
            layers=config.num_hidden_layers,
            width=attention_width(config),
            trained_head=self.vocab_size * config.hidden_size,
        )

    def _token_scores(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, candidates: Tensor | None, entropy_gradient: bool
    ) -> TokenScores:
        weight = self.lm.get_output_embeddings().weight
        return trained_head_scores(hidden, weight, targets, temperatures, candidates, entropy_gradient=entropy_gradient)

    def _head_products(self) -> PackedLinear:
        weight = self.lm.get_output_embeddings().weight.detach()
        return PackedLinear(weight, weight, None, packed=False)


class _FrozenBase:
    """The base model as it was, for the distance of the policy to it."""

    def __init__(self, folder: Path, device: str) -> None:
        model = load_model(folder, torch.float32).requires_grad_(False).to(device).eval()
        self._backbone = model.get_decoder()
        self._weight = model.get_output_embeddings().weight
        self._head = PackedLinear.of(self._weight)

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Returns the log-probs of the trained tokens, float32 [m]."""
        hidden = predicting_states(self._backbone, batch)
        return token_scores(hidden, self._head, self._weight, batch.targets, batch.temperatures).logprobs


def _version_files(folder: Path) -> VersionFiles:
    settings = json.loads((folder / MODEL_CONFIG).read_bytes())
    settings |= {key: "float32" for key in _DTYPE_KEYS if key in settings}
    config = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    return VersionFiles(MODEL_WEIGHTS, {MODEL_CONFIG: config} | companion_files(folder))
