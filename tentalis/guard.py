"""What a version must be like to be served: limits, what was seen of it, and the judgement. Pure.

The case that it is made for: a policy that learned that short answers please, and went on until every answer was one
word. Its reward had never been better.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

NotNegative = Annotated[float, Field(ge=0.0)]


# Modes of a Promotion: what a guard of each kind and a person wrote. After `rollback` the trainer branches.
ROLLBACK = "rollback"
# Experiments of the guard's EvalResults: before a version is served, and while it is.
CANDIDATE, LIVE = "guard", "guard-live"


class Mode(StrEnum):
    """Who decides about a new version of a run."""

    ALWAYS = "always"
    GUARDED = "guarded"
    MANUAL = "manual"


class Limits(BaseModel):
    """What a version must keep to under `promotion: guarded`. Length is in response tokens, a mean over answers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_length: NotNegative = 4.0
    """Answers shorter than this on average are a collapse, whatever the base model does."""
    min_length_ratio: NotNegative = 0.25
    """Least mean length, as a share of the base model's on the same prompts."""
    max_length_ratio: NotNegative = 4.0
    """Greatest mean length, as a multiple of the base model's on the same prompts."""
    max_kl: NotNegative = 1.0
    """Greatest KL divergence from the base model, nats per token of its own answers."""
    max_score_drop: NotNegative = 0.2
    """How far the mean score may fall below that of the version that is served, on a scale from -1 to 1."""
    prompts: Annotated[int, Field(ge=1, le=256)] = 8
    """How many of the policy's latest tasks a candidate is tried on."""
    fixture: tuple[str, ...] = ()
    """Prompts that it is tried on besides, for what no user happens to ask."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Answers are cut here, unless their task allows less."""
    live_answers: Annotated[int, Field(ge=2)] = 16
    """How many rollouts of the served version must be there before it is held against the limits again."""


class BadGuard(Exception):
    """A run whose manifest has no usable promotion or guard."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a run's versions get served."""

    mode: Mode = Mode.ALWAYS
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of_config(cls, config: str) -> "Rule":
        """From the resolved configuration that a manifest carries; one from before there was a choice promotes always.
        Raises BadGuard."""
        try:
            values = yaml.safe_load(config) or {}
            return cls(Mode(values.get("promotion", Mode.ALWAYS)), Limits.model_validate(values.get("guard", {})))
        except (yaml.YAMLError, AttributeError, ValueError, ValidationError) as error:
            raise BadGuard(f"the configuration in the manifest has no usable promotion and guard: {error}") from error


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of a version: means over `answers` answers. `kl` (nats per token) and `score` are None where
    nothing measured them."""

    answers: int
    length: float
    kl: float | None = None
    score: float | None = None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """For an EvalResult."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_metrics(cls, metrics: dict[str, float], prefix: str = "") -> "Evidence | None":
        """The reverse of `metrics`."""
        if f"{prefix}length" not in metrics:
            return None
        return cls(
            int(metrics.get(f"{prefix}answers", 0)),
            metrics[f"{prefix}length"],
            metrics.get(f"{prefix}kl"),
            metrics.get(f"{prefix}score"),
        )


def judge(seen: Evidence, limits: Limits, *, base: Evidence | None = None, served: Evidence | None = None) -> list[str]:
    """Why a version must not be served; nothing: it may. `base`: the base model on the same prompts, `served`: the
    version that is served, on the same prompts or at the same time."""
    if seen.answers == 0:
        return ["it gave no answer"]
    reasons = []
    if seen.length < limits.min_length:
        reasons.append(f"answers have {seen.length:.1f} tokens on average, less than {limits.min_length:g}")
    if base is not None and base.length > 0:
        ratio = seen.length / base.length
        if ratio < limits.min_length_ratio:
            reasons.append(
                f"answers are {ratio:.2f} times as long as the base model's ({seen.length:.1f} and {base.length:.1f} "
                f"tokens), less than {limits.min_length_ratio:g}"
            )
        if ratio > limits.max_length_ratio:
            reasons.append(
                f"answers are {ratio:.2f} times as long as the base model's ({seen.length:.1f} and {base.length:.1f} "
                f"tokens), more than {limits.max_length_ratio:g}"
            )
    if seen.kl is not None and not seen.kl <= limits.max_kl:
        reasons.append(f"the KL divergence from the base model is {seen.kl:.3g} nats per token, over {limits.max_kl:g}")
    if seen.score is not None and served is not None and served.score is not None:
        drop = served.score - seen.score
        if drop > limits.max_score_drop:
            reasons.append(
                f"the mean score is {seen.score:.2f}, that of the served version {served.score:.2f}: it fell by more "
                f"than {limits.max_score_drop:g}"
            )
    return reasons
