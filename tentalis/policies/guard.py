"""The guard of a served version: limits, evidence, and the judgement. Pure.

It prevents this case: a policy learned that short answers please, until every answer was one word. Its reward had never
been better.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

NotNegative = Annotated[float, Field(ge=0.0)]


# Mode of a Promotion that goes back to an earlier version; the trainer then branches.
ROLLBACK = "rollback"
# Experiments of the guard's EvalResults: on a version before it is served, and while it is served.
CANDIDATE, LIVE = "guard", "guard-live"


class GuardMode(StrEnum):
    """Promotion mode of a run: promote every version, only those that pass the guard, or only by hand."""

    ALWAYS = "always"
    GUARDED = "guarded"
    MANUAL = "manual"


class GuardLimits(BaseModel):
    """Limits on a version under `promotion: guarded`. Lengths are means over answers, in response tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_length: NotNegative = 4.0
    """Least mean length; shorter answers count as a collapse, whatever the base model's length."""
    min_length_ratio: NotNegative = 0.25
    """Least mean length, as a share of the base model's on the same prompts."""
    max_length_ratio: NotNegative = 4.0
    """Greatest mean length, as a multiple of the base model's on the same prompts."""
    max_kl: NotNegative = 1.0
    """Greatest KL divergence from the base model, nats per token of its own answers."""
    max_score_drop: NotNegative = 0.2
    """Greatest drop of the mean score below that of the served version, on a scale from -1 to 1."""
    prompts: Annotated[int, Field(ge=1, le=256)] = 8
    """Number of the policy's latest tasks that a candidate is tried on."""
    fixture: tuple[str, ...] = ()
    """Additional prompts that a candidate is tried on, for cases that users do not ask about."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Answers are cut at this number of tokens, unless their task allows less."""
    live_answers: Annotated[int, Field(ge=2)] = 16
    """Number of rollouts of the served version that are needed before it is checked against the limits again."""


class BadGuard(Exception):
    """The manifest of a run has no usable promotion or guard."""


@dataclass(frozen=True, slots=True)
class GuardRule:
    """The promotion rule of a run's versions. `max_staleness`: steps by which a trained sample may be older."""

    mode: GuardMode = GuardMode.ALWAYS
    limits: GuardLimits = field(default_factory=GuardLimits)
    max_staleness: int = 0

    @classmethod
    def of_config(cls, config: str) -> "GuardRule":
        """Reads the rule from the resolved configuration in a manifest; without `promotion`, as in old manifests, the
        mode is always. Raises BadGuard."""
        try:
            values = yaml.safe_load(config) or {}
            return cls(
                GuardMode(values.get("promotion", GuardMode.ALWAYS)),
                GuardLimits.model_validate(values.get("guard", {})),
                int(values.get("max_staleness", 0)),
            )
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, ValidationError) as error:
            raise BadGuard(f"the configuration in the manifest has no usable promotion and guard: {error}") from error


@dataclass(frozen=True, slots=True)
class GuardEvidence:
    """Measurements of a version: means over `answers` answers. `kl` (nats per token) and `score` are None if they were
    not measured."""

    answers: int
    length: float
    kl: float | None = None
    score: float | None = None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The metrics of an EvalResult."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_metrics(cls, metrics: dict[str, float], prefix: str = "") -> "GuardEvidence | None":
        """The inverse of `metrics`; None if they hold no length."""
        if f"{prefix}length" not in metrics:
            return None
        return cls(
            int(metrics.get(f"{prefix}answers", 0)),
            metrics[f"{prefix}length"],
            metrics.get(f"{prefix}kl"),
            metrics.get(f"{prefix}score"),
        )


def judge(
    evidence: GuardEvidence,
    limits: GuardLimits,
    *,
    base: GuardEvidence | None = None,
    served: GuardEvidence | None = None,
) -> list[str]:
    """The reasons why a version must not be served; empty if it may. `base`: the base model on the same prompts.
    `served`: the served version, on the same prompts or over the same time."""
    if evidence.answers == 0:
        return ["it gave no answer"]
    reasons = []
    if evidence.length < limits.min_length:
        reasons.append(f"answers have {evidence.length:.1f} tokens on average, less than {limits.min_length:g}")
    if base is not None and base.length > 0:
        ratio = evidence.length / base.length
        if ratio < limits.min_length_ratio:
            reasons.append(
                f"answers are {ratio:.2f} times as long as the base model's ({evidence.length:.1f} and "
                f"{base.length:.1f} tokens), less than {limits.min_length_ratio:g}"
            )
        if ratio > limits.max_length_ratio:
            reasons.append(
                f"answers are {ratio:.2f} times as long as the base model's ({evidence.length:.1f} and "
                f"{base.length:.1f} tokens), more than {limits.max_length_ratio:g}"
            )
    if evidence.kl is not None and not evidence.kl <= limits.max_kl:
        reasons.append(
            f"the KL divergence from the base model is {evidence.kl:.3g} nats per token, over {limits.max_kl:g}"
        )
    if evidence.score is not None and served is not None and served.score is not None:
        drop = served.score - evidence.score
        if drop > limits.max_score_drop:
            reasons.append(
                f"the mean score is {evidence.score:.2f}, that of the served version {served.score:.2f}: it fell by "
                f"more than {limits.max_score_drop:g}"
            )
    return reasons
