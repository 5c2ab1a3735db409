"""Bounds of the numbers that a rollout trains with. A rollout with a number outside them is not trained on.

A record on the log may hold any number that its type allows, because records of earlier versions must stay readable. So
each writer checks these bounds before it writes (bridge, gateway, scoring), and the trainer checks every rollout.
Log-probs that are NaN or infinite are not checked here: the trainer excludes only their tokens.
"""

import numpy as np

from schemas.records import Rollout
from schemas.tensors import Float32Array, float32_view

MIN_TEMPERATURE = 0.05
"""Lower temperatures are greedy sampling in all but name, and a logit divided by a tiny temperature overflows."""
MAX_TEMPERATURE = 100.0
MIN_LOGPROB = -1e4
"""Servers write -9999 for the log-prob of a token that they consider impossible."""
MAX_LOGPROB = 0.01
"""Above 0 by rounding only."""
MAX_STEP_SCORE = 100.0
"""Largest absolute score of a step; judges give -1 to 1."""
ROUNDING = 1e-6


def trainable_temperature(temperature: float) -> bool:
    """True if answers sampled at this temperature can be trained on."""
    return MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE


def logprobs_in_bounds(logprobs: bytes) -> bool:
    """True if the finite ones of the log-probs (float32) are in bounds."""
    return _within(float32_view(logprobs), MIN_LOGPROB, MAX_LOGPROB)


def out_of_bounds(rollout: Rollout) -> str | None:
    """Returns which number of the rollout is out of bounds, such as "temperature out of bounds"; None if all are
    within. The text leaves out the value itself, so that it can label a metric."""
    if not trainable_temperature(rollout.sampling.temperature):
        return "temperature out of bounds"
    for name in ("sampler_logprobs", "teacher_logprobs", "topk_logprobs"):
        if not logprobs_in_bounds(getattr(rollout, name) or b""):
            return f"{name} out of bounds"
    if not _within(float32_view(rollout.step_scores), -MAX_STEP_SCORE, MAX_STEP_SCORE):
        return "step_scores out of bounds"
    mean, std = rollout.group_mean or 0.0, rollout.group_std or 0.0
    if abs(mean) > 1.0 + ROUNDING or not 0.0 <= std <= 1.0 + ROUNDING:
        return "group statistics out of bounds"
    return None


def _within(values: Float32Array, low: float, high: float) -> bool:
    finite = values[np.isfinite(values)]
    return not len(finite) or bool(finite.min() >= low and finite.max() <= high)
