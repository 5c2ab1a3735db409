"""A cheap score of 0 to 100 for any answer from surface features, without a model and without a reference.

It is a weighted mean, made to be a reward. The `composite` of a trace (`tentalis.traces.judge`) is a sum of points for
what is not broken: the two numbers cannot be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.records import Result, Status, Task
from tentalis.rewards.naming import versioned
from tentalis.rewards.prompting import request_of
from tentalis.rewards.style_scorer import is_prose
from tentalis.rewards.verdict import Verdict
from tentalis.rewards.weights import weighted_mean
from tentalis.text.words import all_stems, content_stems, words

VERSION = "composite/1"
WEIGHTS = {"finished": 0.3, "on_topic": 0.3, "own_words": 0.2, "varied": 0.2}
"""Weights of the parts; each part is in [0, 1]."""
GOOD, BAD = 60.0, 40.0

_MAX_CHARS = 50_000
_FINISHED = {"stop": 1.0, "tool_calls": 1.0, "end_turn": 1.0, "length": 0.0, "content_filter": 0.0}


@dataclass(frozen=True, slots=True)
class CompositeScore:
    """`score` in [0, 100], None if every part is missing; its `parts`, each in [0, 1]; the names of `missing` parts."""

    score: float | None
    parts: Mapping[str, float]
    missing: tuple[str, ...] = ()

    @property
    def binary(self) -> int:
        """1 for a score of at least GOOD, -1 for at most BAD, 0 between them and without a score."""
        if self.score is None:
            return 0
        return 1 if self.score >= GOOD else -1 if self.score <= BAD else 0


def composite(
    prompt: str,
    response: str,
    finish_reason: str = "",
    weights: Mapping[str, float] = WEIGHTS,
    *,
    failed: bool = False,
) -> CompositeScore:
    """Scores a response by four surface features.

    `finished`: the model stopped by itself. `on_topic`: the response has at least a third of the prompt's content
    words. `own_words`: it has content words that the prompt does not have. `varied`: it does not loop (at least half of
    its words are different) and has sentences rather than keywords.

    An empty response or a failed call scores 0. A part that cannot be determined is missing, and the weights of the
    rest are renormalised. The score says nothing about the truth of the answer.

    >>> composite("Why do cats purr?", "", "stop").score, composite("", "cats " * 50, "length").binary
    (0.0, -1)
    """
    response_words = words(response[:_MAX_CHARS])
    if failed or not response_words:
        return CompositeScore(0.0, {"answered": 0.0})
    prompt_stems, response_stems = content_stems(prompt[:_MAX_CHARS]), content_stems(response[:_MAX_CHARS])
    varied = min(1.0, 2.0 * len(set(response_words)) / len(response_words))
    values: dict[str, float | None] = {
        "finished": _FINISHED.get(finish_reason),
        "on_topic": min(1.0, 3.0 * len(prompt_stems & response_stems) / len(prompt_stems)) if prompt_stems else None,
        "own_words": float(bool(response_stems - all_stems(prompt[:_MAX_CHARS]))) if prompt_stems else None,
        "varied": varied if len(response_words) < 8 or is_prose(response_words[:200]) else varied / 2.0,
    }
    mean = weighted_mean(values, weights)
    parts = {name: value for name, value in values.items() if value is not None}
    return CompositeScore(None if mean.value is None else 100.0 * mean.value, parts, mean.missing)


class CompositeSettings(BaseModel):
    """Settings of the composite as a scorer. `weights` replace the default ones; 0 leaves a part out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["composite"]
    weights: dict[
        Literal["finished", "on_topic", "own_words", "varied"], Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    ] = {}


class CompositeScorer:
    """The composite as a reward: 0 is -1, 50 is 0, 100 is 1."""

    slow = False

    def __init__(self, settings: CompositeSettings) -> None:
        given: dict[str, float] = {str(name): weight for name, weight in settings.weights.items()}
        self._weights = {**WEIGHTS, **given}
        self.name = versioned(VERSION, settings)

    def check(self, task: Task) -> None:
        """Accepts every task."""

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns the verdict; unknown if every part is missing."""
        failed = result.status is not Status.OK
        score = composite(request_of(task), result.text, result.finish_reason, self._weights, failed=failed)
        components = {**score.parts, **{f"missing.{name}": 1.0 for name in score.missing}}
        if score.score is None:
            return Verdict.unknown(**components)
        return Verdict(min(1.0, max(-1.0, score.score / 50.0 - 1.0)), {"composite": score.score, **components})

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns None: the composite has no complaints."""
        return None
