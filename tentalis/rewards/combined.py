"""Combines several scorers and the grades of feedback sources into one weighted reward."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic import TypeAdapter as Adapter

from schemas.records import Feedback, Result, Source, Task
from schemas.records import Verifier as Named
from tentalis.rewards.call import call_scorer
from tentalis.rewards.grade import grade
from tentalis.rewards.naming import versioned
from tentalis.rewards.thread_runner import THREAD_S, time_limit_of
from tentalis.rewards.verdict import (
    BadVerifierData,
    FeedbackJudge,
    Judge,
    RewardError,
    Scorer,
    ScorerAway,
    Verdict,
)
from tentalis.rewards.weights import weighted_mean

log = logging.getLogger(__name__)

VERSION = "combined/2"
GRADING_SOURCES = frozenset({Source.MANAGER, Source.USER, Source.ENVIRONMENT, Source.OPERATOR})
"""The sources whose feedback has grades."""
_DATA = Adapter(dict[str, JsonValue])


class RewardPart(BaseModel):
    """One part of a reward: a scorer of the same environment, or the grade in the feedback of a source.

    `data` is the scorer's verifier data, unless the task's own data has an entry under the part's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    scorer: str | None = None
    source: Literal["manager", "user", "environment", "operator"] | None = None
    data: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.scorer is None) == (self.source is None):
            raise ValueError("set either scorer or source")
        if self.source is not None and self.data:
            raise ValueError("data is only allowed with a scorer")
        return self


class CombinedSettings(BaseModel):
    """Settings of a combined reward: its parts by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["combined"]
    parts: Annotated[dict[str, RewardPart], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("at least one part must have a weight above 0")
        return self


class CombinedScorer:
    """The reward sum(w r) / sum(w) over the known parts; unknown if all parts are missing.

    Each missing part is a component `missing.<part>`. A part is missing if its scorer leaves the reward unknown, fails
    or takes too long; if it judges by feedback from sources other than `terms.rl`; or if it is the grade of a source
    that gave none before the reward was made. A part whose endpoint is unavailable makes the result wait, as it would
    alone.

    Args:
        scorers: the scorers that the parts name.
    """

    sources = GRADING_SOURCES | {Source.NEXT_STATE}
    grades = True

    def __init__(self, settings: CombinedSettings, scorers: Mapping[str, Scorer]) -> None:
        self._parts = {name: part for name, part in settings.parts.items() if part.weight}
        self._scorers = {name: scorers[part.scorer] for name, part in self._parts.items() if part.scorer is not None}
        self._weights = {name: part.weight for name, part in self._parts.items()}
        self.graders = frozenset(Source(part.source) for part in self._parts.values() if part.source is not None)
        names = {name: scorer.name for name, scorer in self._scorers.items()}
        self.name = versioned(VERSION, settings, None, names)
        self.time_limit_s = max([THREAD_S, *map(time_limit_of, self._scorers.values())]) + 1.0

    def check(self, task: Task) -> None:
        """Raises BadVerifierData, also for the data of a part."""
        data = self._data(task)
        for name, scorer in self._scorers.items():
            if self._can_be_known(name, task):
                scorer.check(self._task_for_part(name, task, data))
        if not any(self._can_be_known(name, task) for name in self._parts):
            answers = None if task.terms.rl is None else task.terms.rl.value
            raise BadVerifierData(f"{self.name} has no part for terms.rl {answers!r}")

    async def judge(self, task: Task, result: Result) -> Verdict:
        """Returns the verdict on an answer whose reward comes from the result alone."""
        return await self._combine(task, result, None, {})

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """Returns the verdict on an answer whose reward comes from this feedback."""
        return await self._combine(task, result, feedback, {})

    async def judge_grades(
        self, task: Task, result: Result, feedback: Feedback, grades: Mapping[Source, float]
    ) -> Verdict:
        """Returns the verdict, with the earlier grades of the answer by other sources."""
        return await self._combine(task, result, feedback, grades)

    def _can_be_known(self, name: str, task: Task) -> bool:
        """Returns True if a part can be known, given `terms.rl` of the task."""
        part = self._parts[name]
        if part.source is not None:
            return task.terms.rl is not None and part.source == task.terms.rl.value
        scorer = self._scorers[name]
        return not isinstance(scorer, FeedbackJudge) or isinstance(scorer, Judge) or task.terms.rl in scorer.sources

    def _data(self, task: Task) -> Mapping[str, JsonValue]:
        text = "{}" if task.verifier is None else task.verifier.data
        try:
            data = _DATA.validate_json(text)
        except ValidationError as cause:
            raise BadVerifierData(f"the data of {self.name} must be a JSON object: part name -> its data") from cause
        unknown = sorted(data.keys() - self._scorers.keys())
        if unknown:
            known = ", ".join(sorted(self._scorers))
            raise BadVerifierData(f"{self.name} accepts data for {known}, not for {', '.join(unknown)}")
        return data

    def _task_for_part(self, name: str, task: Task, data: Mapping[str, JsonValue]) -> Task:
        """Returns the task with the verifier data of a part."""
        part = self._parts[name]
        assert part.scorer is not None
        text = Adapter(JsonValue).dump_json(data.get(name, part.data)).decode()
        return task.model_copy(update={"verifier": Named(name=part.scorer, data=text)})

    async def _combine(
        self, task: Task, result: Result, feedback: Feedback | None, grades: Mapping[Source, float]
    ) -> Verdict:
        data, failures = self._data(task), list[Exception]()

        async def score(name: str) -> Verdict:
            try:
                verdict = await self._score_part(name, self._task_for_part(name, task, data), result, feedback)
                if verdict.reward is not None and not -1.0 <= verdict.reward <= 1.0:
                    raise ValueError(f"a reward of {verdict.reward}: it must lie in [-1, 1]")
                return verdict
            except (RewardError, ScorerAway):
                raise
            except Exception as error:  # noqa: BLE001 - a scorer may fail in any way; the others still count
                log.warning("%s of %s failed on result %s: %r", name, self.name, result.result_id, error)
                failures.append(error)
                return Verdict.unknown(failed=1.0)

        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(_verdict_or_error(score(name))) for name in self._scorers}
        verdicts: dict[str, Verdict] = {}
        for name, scoring in tasks.items():
            verdict_or_error = scoring.result()
            if isinstance(verdict_or_error, Exception):
                raise verdict_or_error
            verdicts[name] = verdict_or_error
        for name, part in self._parts.items():
            if part.source is not None:
                from_source = feedback is not None and feedback.source.value == part.source
                verdicts[name] = Verdict(
                    grade(feedback) if from_source and feedback else grades.get(Source(part.source))
                )
        mean = weighted_mean({name: verdicts[name].reward for name in self._parts}, self._weights)
        if mean.value is None and failures:
            raise failures[0]
        return self._verdict(verdicts, mean.value, mean.present, mean.missing)

    def _verdict(
        self, verdicts: Mapping[str, Verdict], reward: float | None, present: float, missing: tuple[str, ...]
    ) -> Verdict:
        components = {f"missing.{name}": 1.0 for name in missing} | {"weight_present": present}
        votes: list[str] = []
        for name in self._parts:
            verdict = verdicts[name]
            if verdict.reward is not None:
                components[name] = verdict.reward
            components |= {f"{name}.{key}": value for key, value in verdict.components.items()}
            votes += [f"{name}:{vote}" for vote in verdict.votes]
        steps = next((verdicts[name].steps for name in self._parts if verdicts[name].steps), ())
        if reward is None:
            components["unverified"] = 1.0
        return Verdict(reward, components, tuple(votes), steps)

    async def _score_part(self, name: str, task: Task, result: Result, feedback: Feedback | None) -> Verdict:
        scorer = self._scorers[name]
        if not self._can_be_known(name, task):
            return Verdict.unknown()
        if isinstance(scorer, FeedbackJudge) and feedback is not None and feedback.source in scorer.sources:
            async with asyncio.timeout(scorer.time_limit_s):
                return await scorer.judge_feedback(task, result, feedback)
        assert not isinstance(scorer, FeedbackJudge), "_answers has excluded it"
        return await call_scorer(scorer, task, result)


async def _verdict_or_error(call: Any) -> Verdict | Exception:
    """Returns the verdict, or the exception, so that one part does not cancel the others."""
    try:
        verdict: Verdict = await call
        return verdict
    except (RewardError, ScorerAway) as error:
        return error
