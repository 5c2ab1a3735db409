"""Rewards: scorers by environment and name. Verifiers are pure functions of task and result, judges ask somebody."""

from tentalis.rewards.grade import grade
from tentalis.rewards.registry import (
    check,
    check_environment,
    complaint,
    load_plugins,
    register,
    scorer_name,
    scorer_of,
    settled,
    tallies,
    verify,
)
from tentalis.rewards.verdict import (
    BadVerifierData,
    FeedbackJudge,
    Judge,
    RewardError,
    ScoredStep,
    Scorer,
    ScorerAway,
    UnknownEnvironment,
    UnknownVerifier,
    Verdict,
    Verifier,
)

__all__ = [
    "BadVerifierData",
    "FeedbackJudge",
    "Judge",
    "RewardError",
    "ScoredStep",
    "Scorer",
    "ScorerAway",
    "UnknownEnvironment",
    "UnknownVerifier",
    "Verdict",
    "Verifier",
    "check",
    "check_environment",
    "complaint",
    "grade",
    "load_plugins",
    "register",
    "scorer_name",
    "scorer_of",
    "settled",
    "tallies",
    "verify",
]
