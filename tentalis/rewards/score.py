"""The Score that a verdict on a result becomes."""

from typing import Any

from schemas.ids import derived_id
from schemas.records import Result, Score, Source, TokenSpan, sample_of
from schemas.tensors import float32_bytes
from tentalis.rewards.verdict import Verdict


def score_of_result(result: Result, verdict: Verdict, scorer: str, at: int) -> Score:
    """Returns the RL half whose reward comes from a result, written at `at` (ms). The same result and scorer give the
    same id."""
    return Score(
        score_id=derived_id("score", result.result_id, scorer, None),
        event_time=at,
        opened_at=result.opened_at,
        sample=sample_of(result),
        source=Source.RESULT,
        scorer=scorer,
        task_at=result.opened_at,
        **verdict_fields(verdict),
    )


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Returns the fields of a Score that a verdict fills."""
    return {
        "reward": verdict.reward,
        "components": verdict.components,
        "votes": verdict.votes,
        "step_scores": float32_bytes([step.score for step in verdict.steps]),
        "step_spans": tuple(TokenSpan(start=step.start, end=step.end) for step in verdict.steps),
    }
