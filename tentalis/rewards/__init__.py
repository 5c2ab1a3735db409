"""Rewards: verifiers by environment and name, pure functions of a task and a result."""

from tentalis.rewards.registry import check, check_environment, complaint, scorer_name, verifier_of, verify
from tentalis.rewards.verdict import BadVerifierData, RewardError, UnknownEnvironment, UnknownVerifier, Verdict

__all__ = [
    "BadVerifierData",
    "RewardError",
    "UnknownEnvironment",
    "UnknownVerifier",
    "Verdict",
    "check",
    "check_environment",
    "complaint",
    "scorer_name",
    "verifier_of",
    "verify",
]
