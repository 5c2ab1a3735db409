"""The configuration of a training run: every setting with its default and its meaning. Files: file.py."""

from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tentalis.policies.guard import GuardLimits
from trainer.config.config_model import ConfigModel, NotNegative, Positive
from trainer.config.loss import LossConfig
from trainer.config.training_hours import DailyWindow, zone_of

KEPT_MODELS = 4
"""keep_adapters with full fine-tuning: a version has the size of the model."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the place and the reason."""


class LoraShape(ConfigModel):
    """The shape of the adapter."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank r of the two factors."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """The linear layers that get a pair of factors: all except the head, or the last names of modules (`q_proj`,
    ...)."""
    dropout: Annotated[float, Field(ge=0.0, le=0.0)] = 0.0
    """Must be 0: with dropout the ratio to the sampler is not 1 even for the policy that sampled."""


def _check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError("both betas must lie in [0, 1)")
    return betas


class OptimizerConfig(ConfigModel):
    """AdamW, and the learning rate as a function of the step (see schedule.py)."""

    lr: Positive = 3e-4
    """Learning rate, at its highest. Adapters need about ten times that of full fine-tuning."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the rate after the warm-up: none, linear, or half a cosine."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The rate rises linearly over this many first steps of the run; at the last of them it is the highest."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """The step of the run from which on the rate is final_lr_fraction of the highest; required unless the schedule is
    constant."""
    final_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Fraction of the highest rate that remains after decay_steps."""
    betas: Annotated[tuple[float, float], AfterValidator(_check_betas)] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """A gradient with a larger global L2 norm is scaled down to this norm."""

    @model_validator(mode="after")
    def _decays_after_the_warm_up(self) -> "OptimizerConfig":
        if self.schedule != "constant" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise ValueError(f"the schedule {self.schedule} needs decay_steps, more than warmup_steps")
        return self


class TrackingConfig(ConfigModel):
    """Trackers that receive the metrics of each step, besides the log and /metrics. A tracker that fails is logged once
    and dropped; training does not wait for it (the package's extra `tracking` installs the libraries)."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Any of tensorboard and wandb."""
    folder: str | None = None
    """Folder of their files; null: tracking/RUN below TENTALIS_HOME. A run that a rollback begins has its own
    folder."""
    wandb_project: str = "tentalis"
    """The project in W&B; the run there has this run's id."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: files that `wandb sync` uploads; online: uploads during the run, with the login of the environment."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of one rank's device, for MFU; null: the fastest of a few matrix products at the start."""


def _check_start(start: Any) -> Any:
    if isinstance(start, dict) and any(partition < 0 or offset < 0 for partition, offset in start.items()):
        raise ValueError("partitions and offsets must not be negative")
    return start


def _as_tuple(hours: Any) -> Any:
    return (hours,) if isinstance(hours, str) else hours


def _check_hours(hours: tuple[str, ...]) -> tuple[str, ...]:
    for text in hours:
        DailyWindow.parse(text)
    return hours


def _check_zone(name: str) -> str:
    zone_of(name)
    return name


class TrainerConfig(ConfigModel):
    """One run of one policy."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", examples=["run-1"])]
    """Name of the run on every topic and in the state directory. The same id resumes it."""
    policy: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", examples=["assistant"])]
    """The policy that is trained; its adapters are called policy@vN."""
    base_model: Annotated[str, Field(examples=["smollm2"])]
    """The frozen base model: a folder, a hub id, or `smollm2` (the small model that comes as a package)."""
    base_model_name: Annotated[str, Field(min_length=1, examples=["smollm2"])]
    """The name of the base model on the servers."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """The trainer ends with exit code 0 after this many steps of the run; null: it never ends by itself. Only the
    steps of the run that its weights include count: after a rollback neither the abandoned ones nor those of another
    run, if it continues from a version of that one."""
    batch_rollouts: Annotated[int, Field(ge=1)] = 32
    """Rollouts of one optimizer step, over all ranks."""
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """A batch is also full, before batch_rollouts, as soon as its rollouts have this many tokens; null: by count
    only."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 1024
    """Most tokens (prompt and response, without sharing) of one forward pass; a longer single rollout is processed
    alone. The default is for CPUs, and small on a GPU too: a model server may share it, and how much memory the trainer
    has there is not known. 16384 on a GPU of its own took 51 to 74 GiB with 4B parameters."""
    max_rollout_tokens: Annotated[int, Field(ge=2)] = 4096
    """Longer rollouts are dropped."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Most optimizer steps between the policy that sampled a rollout and the one that is trained. Also the number of
    steps (at least 1) that the trainer may be ahead of the served version before it waits."""
    start: Literal["earliest", "latest"] | Annotated[dict[int, int], AfterValidator(_check_start)] = "latest"
    """Start of a new run on the rollout topic: the beginning, the present end, or an offset per partition."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the adapter's first weights and, with the step's number, of every step."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each rank; null: the machine's cores divided by its ranks. Floating point sums depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if there is one. On cuda each rank needs its own GPU."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen base weights; auto: bfloat16 on a GPU, else float32. Adapter, loss and optimizer are
    always float32; on a GPU the products with the adapter have the precision of the base."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and recompute the rest: about a quarter more time for a
    fraction of the memory, and the same gradient."""
    initial_adapter: str | None = None
    """A folder with an adapter in PEFT's format, of the same rank, alpha and layers, from which a new run starts; null:
    a fresh one, drawn from the seed."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints that stay on disk, besides those that may still be needed: within the staleness
    window, served, pinned, or the target of a rollback."""
    keep_adapters: Annotated[int, Field(ge=1)] = 64
    """Number of the policy's newest adapters that stay on disk, besides those that may still be needed, as above."""
    promotion: Literal["always", "guarded", "manual"] = "guarded"
    """Decides which new versions are served: always (all of them), guarded (those that the guard approves), or manual
    (those that a person promotes with `tentalis policy`)."""
    guard: GuardLimits = GuardLimits()
    windows: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_check_hours)] = ()
    """Hours in which steps begin, for example `02:00-06:00`, also over midnight; none: always. Rollouts wait on the
    log. The windows do not affect a step: a replay ignores them."""
    time_zone: Annotated[str, AfterValidator(_check_zone)] = "UTC"
    """The IANA time zone of `windows`, for example Europe/Berlin; they follow its daylight saving time."""
    lora: LoraShape | None = LoraShape()
    """The adapter; null: full fine-tuning, which trains all parameters of the base model in float32. A version is then
    a whole model. optimizer.lr must then be set, and keep_adapters is 4 unless it is set."""
    zero_stage: Literal[0, 1] = 0
    """1: each rank holds a part of the optimizer's state (ZeRO 1), for full fine-tuning on several ranks. 0: each holds
    all of it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _keep_fewer_whole_models(cls, data: Any) -> Any:
        if isinstance(data, dict) and "lora" in data and data["lora"] is None and "keep_adapters" not in data:
            return data | {"keep_adapters": KEPT_MODELS}
        return data

    @model_validator(mode="after")
    def _can_train_the_whole_model(self) -> "TrainerConfig":
        if self.lora is not None:
            if self.zero_stage:
                raise ValueError(
                    "zero_stage: 1 needs lora: null: the optimizer's state of an adapter is small, and the frozen "
                    "weights beside it are not sharded. Leave zero_stage out"
                )
            return self
        if self.initial_adapter is not None:
            raise ValueError(
                "initial_adapter needs lora: with lora: null all parameters of base_model are trained. To begin with "
                "an adapter, merge it (tentalis policy export --format merged) and name that folder as base_model"
            )
        if self.base_dtype == "bfloat16":
            raise ValueError(
                "base_dtype: bfloat16 needs lora: with lora: null the weights are trained, in float32. Leave "
                "base_dtype out"
            )
        if "lr" not in self.optimizer.model_fields_set:
            raise ValueError(
                f"lora: null needs optimizer.lr: its default {self.optimizer.lr:g} is an adapter's. A tenth of an "
                "adapter's rate or less is usual, for example 1e-5"
            )
        return self


def config_text(config: TrainerConfig) -> str:
    """Returns the resolved configuration with every default written out, as in the run's manifest."""
    return as_yaml(config.model_dump(mode="json"))


def given_text(config: TrainerConfig) -> str:
    """Returns only the settings that were given; defaults and other systems' variables can still fill in the rest."""
    return as_yaml(config.model_dump(mode="json", exclude_unset=True))


def as_yaml(data: object) -> str:
    """Returns settings as YAML, with sorted keys."""
    text: str = yaml.safe_dump(data, sort_keys=True, allow_unicode=True)
    return text
