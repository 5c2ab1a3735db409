"""The guard of a served version: its settings, and the evidence on a version. Pure; guard_decision.py decides.

It prevents this case: a policy learned that short answers please, until every answer was one word. Its reward had never
been better.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.problems import problems

NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


# Mode of a Promotion that goes back to an earlier version; the trainer then branches.
ROLLBACK = "rollback"
# Experiments of the guard's EvalResults: on a version before it is served, and while it is served.
CANDIDATE, LIVE = "guard", "guard-live"


class GuardMode(StrEnum):
    """Promotion mode of a run: promote every version, only those that pass the guard, or only by hand."""

    ALWAYS = "always"
    GUARDED = "guarded"
    MANUAL = "manual"


class GuardJudge(BaseModel):
    """A model that scores a candidate's answers to tasks without a rule, such as turns of a conversation. The process
    that promotes asks it: `tentalis serve policies`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """URL of an OpenAI-compatible endpoint, with or without /v1; null: no judge."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """The model's name there."""
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable of that process that holds the API key; null: no key."""
    time_limit_s: Annotated[float, Field(gt=0.0, le=100.0)] = 60.0
    """Time limit of one vote, in seconds."""

    @model_validator(mode="after")
    def _usable(self) -> "GuardJudge":
        if self.url is None:
            return self
        if self.model is None:
            raise ValueError("url needs model, the name of the model there")
        from tentalis.policies.trial_judge import endpoint_of

        try:
            endpoint_of(self)
        except ValidationError as error:
            raise ValueError(problems(error, "judge")) from error
        return self


class GuardLimits(BaseModel):
    """Limits on a version under `promotion: guarded`. Lengths are means over answers, in response tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_length: NotNegative = 4.0
    """Least mean length; shorter answers count as a collapse, whatever the base model's length."""
    min_length_ratio: NotNegative = 0.15
    """Least mean length, as a share of the base model's on the same prompts."""
    max_length_ratio: NotNegative = 2.5
    """Greatest mean length, as a multiple of the base model's on the same prompts."""
    max_kl: NotNegative = 1.0
    """Greatest KL divergence from the base model, nats per token of its own answers."""
    max_score_drop: NotNegative = 0.2
    """Greatest drop of the mean score below that of the served version, on a scale from -1 to 1. It counts only with
    min_answers 0, where no answers are compared in pairs."""
    min_answers: Annotated[int, Field(ge=0, le=256)] = 64
    """Number of answers on which a candidate is judged, spread evenly over the prompts and, if need be, rounded up.
    Their scores are compared in pairs with the served version's and the base model's. 0: one answer for each prompt,
    and no test of pairs."""
    early_pass: Share = 0.75
    """A candidate passes after a quarter or half of the answers if no measurement is further than this share of the
    way to its limit, and its scores give no reason for doubt. 0: never."""
    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Greatest probability that the test of scores refuses a candidate as good as the served version and the base."""
    min_distinct_ratio: NotNegative = 0.25
    """Least share of different pairs of tokens in all answers, as a share of the base model's; 0: no limit."""
    max_similarity: Share = 0.6
    """Greatest mean similarity (Jaccard, three tokens) of answers to different prompts, if it is also greater than the
    base model's; 1: no limit."""
    max_unfinished_rise: Share = 0.3
    """Greatest rise of the share of answers that end at the limit of tokens, over the base model's; 1: no limit."""
    prompts: Annotated[int, Field(ge=1, le=256)] = 8
    """Number of the policy's latest tasks that a candidate is tried on."""
    fixture: tuple[str, ...] = ()
    """Additional prompts that a candidate is tried on, for cases that users do not ask about."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Answers are cut at this number of tokens, unless their task allows less."""
    judge: GuardJudge = GuardJudge()
    live_answers: Annotated[int, Field(ge=2)] = 16
    """Number of rollouts of the served version that are needed before it is checked against the limits again."""


# The meaning of a manifest that was written before these settings existed.
BEFORE = {
    "min_length_ratio": 0.25,
    "max_length_ratio": 4.0,
    "min_answers": 0,
    "early_pass": 0.0,
    "min_distinct_ratio": 0.0,
    "max_similarity": 1.0,
    "max_unfinished_rise": 1.0,
}


class BadGuard(Exception):
    """The manifest of a run has no usable promotion or guard."""


@dataclass(frozen=True, slots=True)
class GuardRule:
    """The promotion rule of a run's versions. `max_staleness`: steps by which a trained sample may be older.
    `begins_with_base`: True if a run without a parent begins with the base model's weights, not with an adapter."""

    mode: GuardMode = GuardMode.ALWAYS
    limits: GuardLimits = field(default_factory=GuardLimits)
    max_staleness: int = 0
    begins_with_base: bool = False

    @classmethod
    def of_config(cls, config: str) -> "GuardRule":
        """Reads the rule from the resolved configuration in a manifest; without `promotion`, as in old manifests, the
        mode is always, and settings of the guard that are missing keep the meaning of their time. Raises BadGuard."""
        try:
            values = yaml.safe_load(config) or {}
            return cls(
                GuardMode(values.get("promotion", GuardMode.ALWAYS)),
                GuardLimits.model_validate(BEFORE | dict(values.get("guard", {}))),
                int(values.get("max_staleness", 0)),
                values.get("initial_adapter") is None,
            )
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, ValidationError) as error:
            raise BadGuard(f"the configuration in the manifest has no usable promotion and guard: {error}") from error


@dataclass(frozen=True, slots=True)
class GuardEvidence:
    """Measurements of a version: means over `answers` answers. What is None was not measured. `kl`: nats per token.
    `distinct`: share of different pairs of tokens. `similarity`: of answers to different prompts. `unfinished`: share
    of answers that end at the limit of tokens. `scores`: by answer, in the order of prompts and seeds; not recorded."""

    answers: int
    length: float
    kl: float | None = None
    score: float | None = None
    distinct: float | None = None
    similarity: float | None = None
    unfinished: float | None = None
    scores: tuple[float | None, ...] = ()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The metrics of an EvalResult."""
        values = asdict(self)
        del values["scores"]
        return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}

    @classmethod
    def of_metrics(cls, metrics: dict[str, float], prefix: str = "") -> "GuardEvidence | None":
        """The inverse of `metrics`; None if they hold no length."""
        if f"{prefix}length" not in metrics:
            return None
        return cls(
            int(metrics.get(f"{prefix}answers", 0)),
            metrics[f"{prefix}length"],
            kl=metrics.get(f"{prefix}kl"),
            score=metrics.get(f"{prefix}score"),
            distinct=metrics.get(f"{prefix}distinct"),
            similarity=metrics.get(f"{prefix}similarity"),
            unfinished=metrics.get(f"{prefix}unfinished"),
        )
