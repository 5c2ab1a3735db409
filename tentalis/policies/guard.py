"""The guard of a served version: limits, evidence, and the judgement. Pure.

It prevents this case: a policy learned that short answers please, until every answer was one word. Its reward had never
been better.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tentalis.policies.guard_statistics import evidence_of_drop

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


class GuardLimits(BaseModel):
    """Limits on a version under `promotion: guarded`. Lengths are means over answers, in response tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_length: NotNegative = 4.0
    """Least mean length; shorter answers count as a collapse, whatever the base model's length."""
    min_length_ratio: NotNegative = 0.25
    """Least mean length, as a share of the base model's on the same prompts."""
    max_length_ratio: NotNegative = 2.5
    """Greatest mean length, as a multiple of the base model's on the same prompts."""
    max_kl: NotNegative = 1.0
    """Greatest KL divergence from the base model, nats per token of its own answers."""
    max_score_drop: NotNegative = 0.2
    """Greatest drop of the mean score below that of the served version, on a scale from -1 to 1. It counts where no
    answers can be paired: for rollouts of the served version, and for a candidate with min_answers 0."""
    min_answers: Annotated[int, Field(ge=0, le=256)] = 64
    """Least number of answers of a candidate, spread evenly over the prompts. Their scores are compared in pairs with
    the served version's and the base model's. 0: one answer for each prompt, and no test of pairs."""
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
    live_answers: Annotated[int, Field(ge=2)] = 16
    """Number of rollouts of the served version that are needed before it is checked against the limits again."""


# The meaning of a manifest that was written before these settings existed.
BEFORE = {
    "max_length_ratio": 4.0,
    "min_answers": 0,
    "min_distinct_ratio": 0.0,
    "max_similarity": 1.0,
    "max_unfinished_rise": 1.0,
}


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
        mode is always, and settings of the guard that are missing keep the meaning of their time. Raises BadGuard."""
        try:
            values = yaml.safe_load(config) or {}
            return cls(
                GuardMode(values.get("promotion", GuardMode.ALWAYS)),
                GuardLimits.model_validate(BEFORE | dict(values.get("guard", {}))),
                int(values.get("max_staleness", 0)),
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
    if base is not None:
        reasons += _collapsed(evidence, limits, base)
    return reasons + _worse(evidence, limits, base, served)


def _collapsed(evidence: GuardEvidence, limits: GuardLimits, base: GuardEvidence) -> list[str]:
    """The reasons in the answers' variety and ends."""
    reasons = []
    if evidence.distinct is not None and base.distinct is not None:
        ratio = evidence.distinct / base.distinct if base.distinct else 1.0
        if ratio < limits.min_distinct_ratio:
            reasons.append(
                f"{evidence.distinct:.3f} of the pairs of tokens differ, {ratio:.2f} times the base model's share, "
                f"less than {limits.min_distinct_ratio:g}"
            )
    similar, unfinished = evidence.similarity, evidence.unfinished
    if similar is not None and base.similarity is not None and similar > max(limits.max_similarity, base.similarity):
        reasons.append(
            f"answers to different prompts have a similarity of {similar:.2f} (the base model's: "
            f"{base.similarity:.2f}), more than {limits.max_similarity:g}"
        )
    rise = None if unfinished is None or base.unfinished is None else unfinished - base.unfinished
    if rise is not None and rise > limits.max_unfinished_rise:
        reasons.append(
            f"{unfinished:.0%} of the answers end at the limit of tokens, of the base model's "
            f"{base.unfinished:.0%}: it rose by more than {limits.max_unfinished_rise:.0%}"
        )
    return reasons


def _worse(
    evidence: GuardEvidence, limits: GuardLimits, base: GuardEvidence | None, served: GuardEvidence | None
) -> list[str]:
    """The reasons in the scores. Comparing with the base model too keeps small drops from adding up."""
    if evidence.score is None:
        return []
    references = {"served version": served, "base model": base}
    compared = {
        name: other for name, other in references.items() if other is not None and evidence.scores and other.scores
    }
    reasons = []
    if limits.min_answers:
        for name, other in compared.items():
            if evidence_of_drop(evidence.scores, other.scores) >= len(compared) / limits.alpha:
                reasons.append(
                    f"the mean score is {evidence.score:.2f}, that of the {name} {other.score or 0.0:.2f}: worse in "
                    f"pairs of answers, with an error rate of {limits.alpha:g}"
                )
    paired = limits.min_answers > 0 and "served version" in compared
    before = None if paired or served is None else served.score
    if before is not None and before - evidence.score > limits.max_score_drop:
        reasons.append(
            f"the mean score is {evidence.score:.2f}, that of the served version {before:.2f}: it fell by more than "
            f"{limits.max_score_drop:g}"
        )
    return reasons
