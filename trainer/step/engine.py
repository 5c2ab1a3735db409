"""The optimizer step: a policy in a DeepSpeed engine."""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Parameter

from tentalis.service.imports import without_collections
from tentalis.service.lifecycle import Unmendable
from tentalis.service.stdout import libraries_to_stderr
from trainer.config.trainer_config import TrainerConfig
from trainer.data.pack import PackedBatch
from trainer.distributed.ranks import START_SECONDS, RankGroup
from trainer.distributed.runtime import base_dtype_of
from trainer.model.logprobs import TokenScores
from trainer.model.make import make_policy
from trainer.model.model import BadAdapter, read_adapter
from trainer.model.policy import TrainedPolicy
from trainer.step.schedule import learning_rate
from trainer.step.sharded import MOMENTS, gather_moments, set_moments

_engines = itertools.count()


class TrainingDiverged(Unmendable):
    """The policy itself is not finite: no rollout can be trained on. Nothing was written."""


class StepNotFinite(TrainingDiverged):
    """The metrics or the gradient of a step are not finite; nothing was updated. The trainer drops the rollouts that
    cause it (culprits.py); a replay ends with it, because a recorded step was finite."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """AdamW's moments by parameter name, float32 on the CPU, and the number of steps made."""

    moments: dict[str, Tensor]
    steps: int


class TrainingEngine:
    """Forward, backward and step of one rank. Every rank holds the same weights."""

    def __init__(self, config: TrainerConfig, model_folder: Path, rank_group: RankGroup, device: str) -> None:
        """Starts with the adapter drawn from the seed or the base model (see `load_initial_weights`). Every rank makes
        the same engines in the same order. Raises UntrainableModel, BadTargets, RankLost."""
        self.device = device
        self._config = config
        self._grad_clip = config.optimizer.grad_clip
        self._rank_group = rank_group
        dtype = base_dtype_of(config, device)
        os.environ["DS_ACCELERATOR"] = device
        # PEFT imports DeepSpeed, which prints to stdout; our stdout is for data.
        with libraries_to_stderr():
            self.policy = make_policy(config, model_folder, device, dtype)
        rank_group.meet(f"model/{next(_engines)}", "loaded the model", lambda: None, START_SECONDS)
        if config.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        self._parameters = self.policy.trained_parameters()
        self._options = options = config.optimizer
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._parameters, options.weight_decay),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            foreach=False,
        )
        # Runs between DeepSpeed's reduction and the update: the gradient is final, and not applied yet.
        self._optimizer.register_step_pre_hook(lambda *_: self._clip_gradient())
        self._grad_norm = 0.0
        self._discards = False
        with libraries_to_stderr():
            self._engine = _deepspeed_engine(self.policy, self._optimizer, config.zero_stage, self._grad_clip)
        self._is_sharded = config.zero_stage > 0
        self._gathered = OptimizerState({}, 0)

    def load_initial_weights(self) -> bytes:
        """Sets and returns the weights with which a run begins: those of the adapter in the configured folder, else
        those drawn from the seed; of a fully trained model those of the base. Raises BadAdapter."""
        config = self._config
        if config.initial_adapter is None or config.lora is None:
            self.policy.initialise(config.seed)
        else:
            weights = read_adapter(Path(config.initial_adapter), config.lora)
            try:
                self.policy.load_weights(weights)
            except (ValueError, SafetensorError) as error:
                raise BadAdapter(
                    f"initial_adapter: {config.initial_adapter} does not fit {config.base_model} and lora: {error}"
                ) from error
        self._refresh_masters()
        return self.policy.weights_bytes()

    def forward(self, batch: PackedBatch, entropy_gradient: bool = False, n_likeliest: int = 0) -> TokenScores:
        """Returns log-probs, entropies and candidates' log-probs of the trained tokens (see TrainedPolicy.forward)."""
        result: TokenScores = self._engine(batch, entropy_gradient, n_likeliest)
        return result

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that is already divided by the counts of the whole batch."""
        # The reduction over ranks is a mean, but the loss of the batch is a sum over ranks.
        self._engine.backward(loss * self._rank_group.size, scale_wrt_gas=False)

    def zero_loss(self) -> Tensor:
        """Returns a zero loss that reaches every parameter, so that a rank without rows joins the reduction too."""
        return torch.stack([parameter.sum() for _, parameter in self._parameters]).sum() * 0.0

    def step(self, number: int, *, update: bool = True) -> dict[str, float]:
        """Reduces, clips, and updates at the rate of step `number` of the run; returns that rate and the gradient's
        norm before clipping. Without `update` the gradient is reduced and discarded. A collective.

        Raises StepNotFinite, with weights and moments unchanged."""
        rate = learning_rate(number, self._options)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._discards = not update
        self._engine.step()
        if self._is_sharded:
            self._grad_norm = float(self._engine.optimizer._global_grad_norm)
        if not math.isfinite(self._grad_norm):
            raise StepNotFinite(f"the gradient of step {number} is not finite; the adapter was not updated")
        if self._is_sharded and update:
            self._gather_state()
        return {"grad_norm": self._grad_norm, "learning_rate": rate}

    def _gather_state(self) -> None:
        """Gathers the moments of all ranks on rank 0, which saves them. A collective."""
        state: Any = self._optimizer.state
        steps = int(next(iter(state.values()))["step"])
        keep = self._rank_group.rank == 0
        self._gathered = OptimizerState(gather_moments(self._parameters, self._engine.optimizer, state, keep), steps)

    def _refresh_masters(self) -> None:
        """Under ZeRO 1 copies the parameters to the part of them that this rank updates."""
        if self._is_sharded:
            self._engine.optimizer.refresh_fp32_params()

    def _clip_gradient(self) -> None:
        if self._is_sharded:
            # Called once per group, of which DeepSpeed has clipped this rank's part; it calls nothing if the norm is
            # not finite.
            if self._discards:
                for group in self._optimizer.param_groups:
                    for part in group["params"]:
                        part.grad = None
            return
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self._parameters], self._grad_clip, foreach=False)
        self._grad_norm = float(norm)
        if self._discards or not math.isfinite(self._grad_norm):
            # AdamW leaves a parameter without a gradient, and its moments, as they are.
            for _, parameter in self._parameters:
                parameter.grad = None

    def optimizer_state(self) -> OptimizerState:
        """Returns a copy of the moments; under ZeRO 1 those of the last step or checkpoint, without the moments on
        ranks other than 0."""
        if self._is_sharded:
            return self._gathered
        moments: dict[str, Tensor] = {}
        steps = 0
        for name, parameter in self._parameters:
            state = self._optimizer.state.get(parameter)
            if state:
                steps = int(state["step"])
                for moment in MOMENTS:
                    moments[f"{name}.{moment}"] = state[moment].detach().to("cpu", copy=True)
        return OptimizerState(moments, steps)

    def restore(self, weights: bytes, optimizer: OptimizerState) -> None:
        """Sets weights and moments to those of a checkpoint. Raises ValueError if their shapes differ."""
        self.policy.load_weights(weights)
        if self._is_sharded:
            self._refresh_masters()
            state: Any = self._optimizer.state
            set_moments(self._parameters, self._engine.optimizer, state, optimizer.moments, optimizer.steps)
            self._gathered = optimizer if self._rank_group.rank == 0 else OptimizerState({}, optimizer.steps)
            return
        self._optimizer.state.clear()
        for name, parameter in self._parameters:
            if optimizer.steps:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(optimizer.steps)),
                    "exp_avg": optimizer.moments[f"{name}.exp_avg"].to(self.device, copy=True),
                    "exp_avg_sq": optimizer.moments[f"{name}.exp_avg_sq"].to(self.device, copy=True),
                }


def parameter_groups(parameters: Sequence[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Returns AdamW's groups: matrices decay, vectors (norms and biases, which only full fine-tuning trains) do not."""
    groups = [
        {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for _, p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _deepspeed_engine(
    policy: TrainedPolicy, optimizer: torch.optim.Optimizer, zero_stage: int, grad_clip: float
) -> Any:
    with without_collections():
        import deepspeed

    # Disables DeepSpeed's compiled kernels: the shared-memory reduction needs a compiler at run time and reduces
    # differently from gloo. Setting the list also keeps DeepSpeed from starting compilers to detect compatible ops.
    deepspeed.ops.__compatible_ops__ = {}
    engine, *_ = deepspeed.initialize(
        model=policy,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": zero_stage},
            # AdamW is torch's own, of which DeepSpeed steps each rank's part.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # Off without ZeRO; the default is 1. The optimizer's hook clips then, because it needs the norm.
            "gradient_clipping": grad_clip if zero_stage else 0.0,
            "steps_per_print": 2**31,
        },
    )
    return engine
