"""A cheap score of 0 to 100 for any answer, without a model and without a reference: what can be seen from outside."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.records import Result, Status, Task
from tentalis.rewards.naming import versioned
from tentalis.rewards.prompting import request_of
from tentalis.rewards.taste import is_prose
from tentalis.rewards.verdict import Verdict
from tentalis.rewards.weights import weighed
from tentalis.words import all_stems, content_stems, words

VERSION = "composite/1"
WEIGHTS = {"finished": 0.3, "on_topic": 0.3, "own_words": 0.2, "varied": 0.2}
"""Of the parts, each in [0, 1]."""
GOOD, BAD = 60.0, 40.0

_MOST_CHARS = 50_000
_FINISHED = {"stop": 1.0, "tool_calls": 1.0, "end_turn": 1.0, "length": 0.0, "content_filter": 0.0}


@dataclass(frozen=True, slots=True)
class Composite:
    """`score` in [0, 100], None if nothing could be seen; `parts` in [0, 1] that it is made of; those `missing`."""

    score: float | None
    parts: Mapping[str, float]
    missing: tuple[str, ...] = ()

    @property
    def binary(self) -> int:
        """1 from GOOD on, -1 up to BAD, 0 between them and for nothing."""
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
) -> Composite:
    """What can be said of a response from outside: whether the model `finished` by itself, is `on_topic` (a third of
    the content words of the prompt, or more), says it in its `own_words` (content words that the prompt does not have)
    and is `varied` (no loop: at least half of its words are different; sentences rather than keywords).

    Nothing was answered, or the call failed: 0. What cannot be told is missing and the rest takes its place. It knows
    nothing of whether the answer is true.

    >>> composite("Why do cats purr?", "", "stop").score, composite("", "cats " * 50, "length").binary
    (0.0, -1)
    """
    said = words(response[:_MOST_CHARS])
    if failed or not said:
        return Composite(0.0, {"answered": 0.0})
    asked, stated = content_stems(prompt[:_MOST_CHARS]), content_stems(response[:_MOST_CHARS])
    varied = min(1.0, 2.0 * len(set(said)) / len(said))
    values: dict[str, float | None] = {
        "finished": _FINISHED.get(finish_reason),
        "on_topic": min(1.0, 3.0 * len(asked & stated) / len(asked)) if asked else None,
        "own_words": float(bool(stated - all_stems(prompt[:_MOST_CHARS]))) if asked else None,
        "varied": varied if len(said) < 8 or is_prose(said[:200]) else varied / 2.0,
    }
    sums = weighed(values, weights)
    parts = {name: value for name, value in values.items() if value is not None}
    return Composite(None if sums.value is None else 100.0 * sums.value, parts, sums.missing)


class CompositeSettings(BaseModel):
    """The composite as a scorer; `weights` in place of the default ones, 0 leaves a part out."""

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
        """Every task will do."""

    def verify(self, task: Task, result: Result) -> Verdict:
        """The verdict, unknown if every part is missing."""
        failed = result.status is not Status.OK
        of = composite(request_of(task), result.text, result.finish_reason, self._weights, failed=failed)
        components = {**of.parts, **{f"missing.{name}": 1.0 for name in of.missing}}
        if of.score is None:
            return Verdict.unknown(**components)
        return Verdict(min(1.0, max(-1.0, of.score / 50.0 - 1.0)), {"composite": of.score, **components})

    def complaint(self, task: Task, result: Result) -> str | None:
        """It has no taste to complain for."""
        return None
