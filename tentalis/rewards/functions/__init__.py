"""Reward functions as people write them for TRL, verl and verifiers. In: `rewards.py:score`. Out: a scorer.

A function runs in a separate process, with limits of time and memory; a failure costs one reward and names the line.
Begin reading with `signature` (the conventions), then `scorer` (`load`, `describe`) and `process`.
"""

from tentalis.rewards.functions.errors import BadFunction, FunctionError, FunctionTimeout, OutOfRange
from tentalis.rewards.functions.scorer import FunctionScorer, FunctionSettings, RewardDescription, describe, load

__all__ = [
    "BadFunction",
    "FunctionError",
    "FunctionScorer",
    "FunctionSettings",
    "FunctionTimeout",
    "OutOfRange",
    "RewardDescription",
    "describe",
    "load",
]
