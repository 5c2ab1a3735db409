"""The optimizer step: a policy in a DeepSpeed engine."""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tentalis.service import Unmendable
from trainer.config import TrainerConfig
from trainer.logprobs import TokenScores
from trainer.model import Policy, read_adapter
from trainer.pack import Pack
from trainer.runtime import base_dtype_of
from trainer.schedule import learning_rate
from trainer.world import World


class Diverged(Unmendable):
    """The gradient is not finite; nothing was updated. Started again the trainer would execute the same plan."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """AdamW's moments by parameter name, float32 on the CPU, and how many steps were made."""

    moments: dict[str, Tensor]
    steps: int


class Engine:
    """Forward, backward and step of one rank. Every rank holds the same weights."""

    def __init__(self, config: TrainerConfig, model_folder: Path, world: World, device: str) -> None:
        """The adapter is the one that the seed gives (see `begin`). Raises UnsupportedModel, BadTargets."""
        self.device = device
        self._config = config
        self._clip = config.optimizer.grad_clip
        self._world = world
        dtype = base_dtype_of(config)
        os.environ["DS_ACCELERATOR"] = device
        # PEFT imports DeepSpeed, DeepSpeed prints, and our stdout is for data.
        with contextlib.redirect_stdout(sys.stderr):
            self.policy = Policy(model_folder, config.base_model_name, config.lora, config.seed, device, dtype)
        if config.gradient_checkpointing:
            self.policy.checkpoint_layers()
        self._parameters = self.policy.adapter_parameters()
        self._options = options = config.optimizer
        self._optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self._parameters],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            foreach=False,
        )
        # Between DeepSpeed's reduction and the update: the gradient is final, and not applied yet.
        self._optimizer.register_step_pre_hook(lambda *_: self._clip_gradient())
        self._grad_norm = 0.0
        with contextlib.redirect_stdout(sys.stderr):
            self._engine = _deepspeed_engine(self.policy, self._optimizer)

    def begin(self) -> bytes:
        """Sets the weights to those that a run begins with, and returns them: of the adapter in the configured folder,
        else those that the seed gives. Raises BadAdapter, and ValueError if the adapter has another shape."""
        if self._config.initial_adapter is None:
            self.policy.draw(self._config.seed)
        else:
            self.policy.load_adapter(read_adapter(Path(self._config.initial_adapter), self._config.lora))
        return self.policy.adapter_bytes()

    def forward(self, batch: Pack, entropy_gradient: bool = False, likeliest: int = 0) -> TokenScores:
        """Log-probs, entropies and candidates' log-probs of the trained tokens (see Policy.forward)."""
        result: TokenScores = self._engine(batch, entropy_gradient, likeliest)
        return result

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that is already divided by the counts of the whole batch."""
        # The reduction over ranks is a mean, the loss of the batch a sum over ranks.
        self._engine.backward(loss * self._world.size, scale_wrt_gas=False)

    def anchor(self) -> Tensor:
        """A loss of zero that reaches every parameter: with it a rank without rows joins the reduction too."""
        return torch.stack([parameter.sum() for _, parameter in self._parameters]).sum() * 0.0

    def step(self, number: int) -> dict[str, float]:
        """Reduces, clips, updates at the rate of step `number` of the run; returns that rate and the gradient's norm
        before clipping. Raises Diverged."""
        rate = learning_rate(number, self._options)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        return {"grad_norm": self._grad_norm, "learning_rate": rate}

    def _clip_gradient(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self._parameters], self._clip, foreach=False)
        self._grad_norm = float(norm)
        if not torch.isfinite(norm):
            raise Diverged(
                "the gradient is not finite, the adapter was not updated. Look at the plan's rollouts (log-probs, "
                "rewards) and at the learning rate; nothing after this step can be trained"
            )

    def optimizer_state(self) -> OptimizerState:
        """A copy of the moments."""
        moments: dict[str, Tensor] = {}
        steps = 0
        for name, parameter in self._parameters:
            state = self._optimizer.state.get(parameter)
            if state:
                steps = int(state["step"])
                for moment in ("exp_avg", "exp_avg_sq"):
                    moments[f"{name}.{moment}"] = state[moment].detach().to("cpu", copy=True)
        return OptimizerState(moments, steps)

    def load(self, adapter: bytes, optimizer: OptimizerState) -> None:
        """Sets weights and moments to those of a checkpoint. Raises ValueError if they belong to another shape."""
        self.policy.load_adapter(adapter)
        self._optimizer.state.clear()
        for name, parameter in self._parameters:
            if optimizer.steps:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(optimizer.steps)),
                    "exp_avg": optimizer.moments[f"{name}.exp_avg"].to(self.device, copy=True),
                    "exp_avg_sq": optimizer.moments[f"{name}.exp_avg_sq"].to(self.device, copy=True),
                }


def _deepspeed_engine(policy: Policy, optimizer: torch.optim.Optimizer) -> Any:
    import deepspeed

    # None of DeepSpeed's compiled kernels: the shared-memory reduction would need a compiler at run time and does not
    # reduce as gloo does. Given the answer, it does not start compilers to find it either.
    deepspeed.ops.__compatible_ops__ = {}
    engine, *_ = deepspeed.initialize(
        model=policy,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": 0},
            # Its default is 1, not off; the optimizer's hook clips, and knows the norm.
            "gradient_clipping": 0.0,
            "steps_per_print": 2**31,
        },
    )
    return engine
