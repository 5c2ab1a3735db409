"""The configuration of a training run: every setting with its default and what it means. Files: config_file.py."""

from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tentalis.guard import Limits
from trainer.losses.settings import Loss
from trainer.part import NotNegative, Part, Positive
from trainer.windows import Hours, zone_of


class ConfigError(ValueError):
    """The configuration file cannot be used; the message says where and why."""


class Lora(Part):
    """The shape of the adapter."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank r of the two factors."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Which linear layers get a pair of factors: all but the head, or the last names of modules (`q_proj`, ...)."""
    dropout: Annotated[float, Field(ge=0.0, le=0.0)] = 0.0
    """Must be 0: with dropout the ratio to the sampler is not 1 even for the policy that sampled."""


def _betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError("both betas must lie in [0, 1)")
    return betas


class Optimizer(Part):
    """AdamW, and the learning rate as a function of the step (see schedule.py)."""

    lr: Positive = 3e-4
    """Learning rate, at its highest. Adapters want about ten times that of full fine-tuning."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up: not at all, along a line, or along half a cosine."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The rate rises evenly over this many first steps of the run and is the highest at the last of them."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """The step of the run from which on the rate is final_lr_fraction of the highest; needed unless constant."""
    final_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """What is left of the rate after decay_steps, as a fraction."""
    betas: Annotated[tuple[float, float], AfterValidator(_betas)] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """The gradient's global L2 norm is scaled down to this."""

    @model_validator(mode="after")
    def _decays_after_the_warm_up(self) -> "Optimizer":
        if self.schedule != "constant" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise ValueError(f"the schedule {self.schedule} needs decay_steps, more than warmup_steps")
        return self


class Tracking(Part):
    """Where the metrics of each step go besides the log and /metrics. A tracker that fails is named once and left out;
    training does not wait for it (the extra `tracking` of the package has the libraries)."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """None, one or both of tensorboard and wandb."""
    folder: str | None = None
    """Where their files go; null: STATE/tracking/RUN. A run that a rollback begins has a folder of its own."""
    wandb_project: str = "tentalis"
    """The project in W&B; the run there has this run's id."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: files that `wandb sync` uploads; online: as it happens, with the login of the environment."""
    peak_tflops: Positive | None = None
    """What one rank's device can do at most, for MFU; null: the fastest of a few matrix products at the start."""


def _start(start: Any) -> Any:
    if isinstance(start, dict) and any(partition < 0 or offset < 0 for partition, offset in start.items()):
        raise ValueError("partitions and offsets are not negative")
    return start


def _listed(hours: Any) -> Any:
    return (hours,) if isinstance(hours, str) else hours


def _hours(hours: tuple[str, ...]) -> tuple[str, ...]:
    for text in hours:
        Hours.parse(text)
    return hours


def _zone(name: str) -> str:
    zone_of(name)
    return name


class TrainerConfig(Part):
    """One run of one policy."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", examples=["run-1"])]
    """Names the run on every topic and in the state directory. The same id resumes it."""
    policy: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", examples=["assistant"])]
    """The policy that is trained; its adapters are called policy@vN."""
    base_model: Annotated[str, Field(examples=["smollm2"])]
    """What the adapter sits on: a folder, a hub id, or `smollm2` (the small model that comes as a package)."""
    base_model_name: Annotated[str, Field(min_length=1, examples=["smollm2"])]
    """The name under which servers know the base model."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """The trainer ends with exit code 0 after this many steps of the run; null: it goes on."""
    batch_rollouts: Annotated[int, Field(ge=1)] = 32
    """Rollouts of one optimizer step, over all ranks."""
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """A batch is full as soon as its rollouts have this many tokens, also before batch_rollouts; null: by count."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 1024
    """Most tokens (prompt and response, not shared) of one forward pass; a longer single rollout goes alone."""
    max_rollout_tokens: Annotated[int, Field(ge=2)] = 4096
    """Longer rollouts are dropped."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Most versions between the policy that sampled a rollout and the one that is trained; also how many steps the
    trainer may be ahead of the served version before it waits (at least 1)."""
    start: Literal["earliest", "latest"] | Annotated[dict[int, int], AfterValidator(_start)] = "latest"
    """Where a new run begins to read rollouts: the beginning, the present end, or an offset per partition."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the adapter's first weights and, with its number, every step."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each rank; null: the machine's cores shared among the ranks. Sums depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: a GPU if there is one. Ranks on cuda need one each."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen base weights. Adapter, loss and optimizer are always float32."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: about a quarter more time
    for a fraction of the memory, and the same gradient."""
    initial_adapter: str | None = None
    """A folder with an adapter in PEFT's format, of the same rank, alpha and layers, that a new run goes on from; null:
    a fresh one, drawn from the seed."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay on disk, besides those that can still be needed: within the staleness
    window, served, pinned, or what a rollback goes back to."""
    keep_adapters: Annotated[int, Field(ge=1)] = 64
    """How many of the policy's newest adapters stay on disk, besides the same ones."""
    promotion: Literal["always", "guarded", "manual"] = "always"
    """Who decides that a new version is served: nobody (each is), the guard, or a person with `tentalis policy`."""
    guard: Limits = Limits()
    windows: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_hours)] = ()
    """Hours in which steps begin, as `02:00-06:00`, also over midnight; none: always. The log is the buffer. They are
    no part of a step: a replay ignores them."""
    time_zone: Annotated[str, AfterValidator(_zone)] = "UTC"
    """The IANA time zone of `windows`, as Europe/Berlin; they follow its daylight saving."""
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    tracking: Tracking = Tracking()


def config_text(config: TrainerConfig) -> str:
    """The resolved configuration, every default written out: what the run's manifest carries."""
    return as_yaml(config.model_dump(mode="json"))


def given_text(config: TrainerConfig) -> str:
    """Only what was given: what defaults and the ancestors' variables say stays open."""
    return as_yaml(config.model_dump(mode="json", exclude_unset=True))


def as_yaml(data: object) -> str:
    """Settings as YAML, in one order."""
    text: str = yaml.safe_dump(data, sort_keys=True, allow_unicode=True)
    return text
