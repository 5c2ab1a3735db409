"""The guard's decision on a candidate from the evidence so far, and the judgement on any version. Pure.

Begin with `decide`: it is called at each look, at the numbers of rounds that `looks` gives. `judge` gives the reasons
against a version.
"""

from enum import StrEnum
from math import ceil

from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_statistics import doubts, evidence_of_drop


class TrialDecision(StrEnum):
    """The state of a candidate's trial. `more`: more answers are needed."""

    PASS = "pass"
    REFUSE = "refuse"
    MORE = "more"


def looks(rounds: int) -> list[int]:
    """Returns the numbers of rounds after which a candidate is looked at: a quarter of all, half, and all. The answers
    between two looks are sampled in one batch."""
    return sorted({ceil(rounds / 4), ceil(rounds / 2), rounds})


def decide(
    evidence: GuardEvidence,
    limits: GuardLimits,
    *,
    base: GuardEvidence,
    served: GuardEvidence | None = None,
    complete: bool,
) -> tuple[TrialDecision, list[str]]:
    """Returns the decision on a candidate, and the reasons of a refusal.

    `base` and `served` (None if it is the candidate itself) have as many answers as the candidate. Before the answers
    are `complete`, a candidate is refused for its scores alone, because their test holds at any answer, and passes if
    it is far from every limit (`limits.early_pass`).
    """
    if complete:
        reasons = judge(evidence, limits, base=base, served=served)
        return (TrialDecision.REFUSE if reasons else TrialDecision.PASS), reasons
    if reasons := _worse(evidence, limits, base, served):
        return TrialDecision.REFUSE, reasons
    clear = limits.early_pass > 0.0 and _is_clear(evidence, limits, base, served)
    return (TrialDecision.PASS if clear else TrialDecision.MORE), []


def judge(
    evidence: GuardEvidence,
    limits: GuardLimits,
    *,
    base: GuardEvidence | None = None,
    served: GuardEvidence | None = None,
    drop: float | None = None,
) -> list[str]:
    """The reasons why a version must not be served; empty if it may. `base`: the base model on the same prompts.
    `served`: the served version, on the same prompts or over the same time. `drop`: the e-value of a test against
    `served` that the caller continues; None: that of the scores in the evidence."""
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
    return reasons + _worse(evidence, limits, base, served, drop)


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


def _is_clear(evidence: GuardEvidence, limits: GuardLimits, base: GuardEvidence, served: GuardEvidence | None) -> bool:
    """True if a version would also pass with every limit moved towards the base model, to `early_pass` of the way (of
    a ratio: of its logarithm), and its scores give no reason for doubt."""
    share = limits.early_pass
    nearer = limits.model_copy(
        update={
            "min_length": limits.min_length / share,
            "min_length_ratio": limits.min_length_ratio**share,
            "max_length_ratio": limits.max_length_ratio**share,
            "max_kl": limits.max_kl * share,
            "min_distinct_ratio": limits.min_distinct_ratio**share,
            "max_similarity": _nearer_share(limits.max_similarity, share),
            "max_unfinished_rise": _nearer_share(limits.max_unfinished_rise, share),
        }
    )
    others = [other for other in (base, served) if other is not None]
    if any(doubts(evidence.scores, other.scores) for other in others):
        return False
    return not judge(evidence, nearer, base=base, served=served)


def _nearer_share(limit: float, share: float) -> float:
    """A limit on a share, nearer to 0; 1 stays 1 (no limit)."""
    return limit if limit == 1.0 else limit * share


def _worse(
    evidence: GuardEvidence,
    limits: GuardLimits,
    base: GuardEvidence | None,
    served: GuardEvidence | None,
    drop: float | None = None,
) -> list[str]:
    """The reasons in the scores. Comparing with the base model too keeps small drops from adding up."""
    if evidence.score is None:
        return []
    references = {"served version": served, "base model": base}
    compared = {
        name: (other, evidence_of_drop(evidence.scores, other.scores))
        for name, other in references.items()
        if other is not None and evidence.scores and other.scores
    }
    if served is not None and drop is not None:
        compared["served version"] = served, drop
    reasons = []
    if limits.min_answers:
        for name, (other, value) in compared.items():
            if value >= len(compared) / limits.alpha:
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
