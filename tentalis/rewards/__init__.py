"""Rewards. In: a task, its result and feedback. Out: a `Verdict` with a reward in [-1, 1], or unknown.

Scorers are registered by environment and name. Verifiers are pure functions of task and result; judges call a model or
another service. Begin reading with `verdict` (the protocols) and `registry` (the lookup).
"""

from tentalis.rewards.grade import grade
from tentalis.rewards.registry import (
    check,
    check_environment,
    complaint,
    declared_environments,
    has_grading_judge,
    inner_steps,
    load_plugins,
    register,
    scorer_name,
    scorer_of,
    settled_verdict,
    use_environments,
    verify,
    vote_counts,
)
from tentalis.rewards.verdict import (
    INFRASTRUCTURE_FAILED,
    BadVerifierData,
    FeedbackJudge,
    GradingJudge,
    Judge,
    ResultVerifier,
    RewardError,
    ScoredStep,
    Scorer,
    ScorerAway,
    UnknownEnvironment,
    UnknownVerifier,
    Verdict,
)

__all__ = [
    "INFRASTRUCTURE_FAILED",
    "BadVerifierData",
    "FeedbackJudge",
    "GradingJudge",
    "Judge",
    "ResultVerifier",
    "RewardError",
    "ScoredStep",
    "Scorer",
    "ScorerAway",
    "UnknownEnvironment",
    "UnknownVerifier",
    "Verdict",
    "check",
    "check_environment",
    "complaint",
    "declared_environments",
    "grade",
    "has_grading_judge",
    "inner_steps",
    "load_plugins",
    "register",
    "scorer_name",
    "scorer_of",
    "settled_verdict",
    "use_environments",
    "verify",
    "vote_counts",
]
