"""The verdict of a scorer, the protocols of verifiers and judges, and the errors in a task's verifier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.bounds import MAX_STEP_SCORE
from schemas.problems import problems
from schemas.records import Feedback, Result, Source, Task

CallSeconds = Annotated[float, Field(gt=0.0, le=100.0)]
"""Time limit of one call, in seconds. A worker that waits longer is ended as hung (`StreamSettings.stall_limit`)."""


class RewardError(ValueError):
    """A task whose answers cannot be verified: the record is malformed, which says nothing about the answer."""


class UnknownEnvironment(RewardError):
    """An environment that is not registered."""


class UnknownVerifier(RewardError):
    """A verifier that the task's environment does not have."""


class BadVerifierData(RewardError):
    """Verifier data that the verifier cannot read."""


class ScorerAway(Exception):
    """The service behind a judge is unavailable: connection refused, overloaded, or credentials refused.

    The caller asks again without a limit until the service is back. Nothing is wrong with the result.
    """


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """A step of an answer: tokens [start, end) of the sample (prompt and answer in one sequence), and its score."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward in [-1, 1], or None for *unknown*, with the named values it is made of (0/1 for yes/no).

    Unknown means that the verification failed, never that the answer is mediocre; `unverified` is then 1. `votes` are
    the votes of a judge that asks several times, `steps` the scores of a judge that grades each step.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    votes: tuple[str, ...] = ()
    steps: tuple[ScoredStep, ...] = ()

    @classmethod
    def unknown(cls, **components: float) -> "Verdict":
        """The verdict of a verification that could not be carried out."""
        return cls(None, {"unverified": 1.0, **components})


class BadVerdict(ValueError):
    """A verdict with values that a Score must not have."""


def checked_verdict(verdict: Verdict) -> Verdict:
    """Returns the verdict. Raises BadVerdict."""
    if verdict.reward is not None and not -1.0 <= verdict.reward <= 1.0:
        raise BadVerdict(f"the reward is {verdict.reward}: it must lie in [-1, 1]")
    wrong = [name for name, value in verdict.components.items() if not math.isfinite(value)]
    if wrong:
        raise BadVerdict(f"components must be finite numbers: {', '.join(wrong)}")
    if not all(0 <= step.start <= step.end and abs(step.score) <= MAX_STEP_SCORE for step in verdict.steps):
        raise BadVerdict(
            f"scored steps must be spans of tokens with scores from -{MAX_STEP_SCORE:g} to {MAX_STEP_SCORE:g}"
        )
    return verdict


INFRASTRUCTURE_FAILED = Verdict(None, {"infra": 1.0})
"""The verdict on a result with status infra: unknown, so the sample is in no group and is not trained on."""


class ResultVerifier(Protocol):
    """A scorer that applies a rule. Pure: the same task and result give the same verdict."""

    @property
    def name(self) -> str:
        """Name/version. It is part of the id of every Score, so a changed rule needs a new version."""
        ...

    @property
    def slow(self) -> bool:
        """True if `verify` may block an event loop for too long (more than about 10 ms)."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if this verifier cannot read the task's data."""
        ...

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns the verdict on an answer (status ok). Raises BadVerifierData."""
        ...

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns one or two short sentences on the faults of an answer, or None. Raises BadVerifierData."""
        ...


@runtime_checkable
class Judge(Protocol):
    """A scorer that calls another service, such as a model.

    It is called for many results concurrently, again after a failure or a timeout, and perhaps again after a restart,
    so a call must have no side effects.
    """

    @property
    def name(self) -> str:
        """Name/version. It is part of the id of every Score, so another model or prompt needs a new version."""
        ...

    @property
    def time_limit_s(self) -> float:
        """Time limit of one call, in seconds."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if this judge cannot read the task's data."""
        ...

    async def judge(self, task: Task, result: Result) -> Verdict:
        """Returns the verdict on an answer (status ok); `Verdict.unknown()` if the judge could not form one.

        Raises:
            ScorerAway: the service is unavailable now.
            Exception: this call failed. The caller tries a few more times before it makes the reward unknown.
        """
        ...


@runtime_checkable
class FeedbackJudge(Protocol):
    """A scorer that judges an answer by feedback: by the next message, or by a grade. Called like a Judge.

    It is called if `terms.rl` of the task is one of its `sources`, for feedback from that source without a grade.
    """

    @property
    def name(self) -> str:
        """See `Judge.name`."""
        ...

    @property
    def time_limit_s(self) -> float:
        """See `Judge.time_limit_s`."""
        ...

    @property
    def sources(self) -> frozenset[Source]:
        """The sources of the feedback that it judges by."""
        ...

    @property
    def grades(self) -> bool:
        """True if it is also called for graded feedback, and makes the grade a part of the reward."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if this judge cannot use the task's data or its terms."""
        ...

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """Returns the verdict on an answer (status ok); raises the same errors as `Judge.judge`."""
        ...


@runtime_checkable
class GradingJudge(FeedbackJudge, Protocol):
    """A FeedbackJudge that makes the grades of other sources parts of the reward."""

    @property
    def graders(self) -> frozenset[Source]:
        """The sources of these grades."""
        ...

    async def judge_grades(
        self, task: Task, result: Result, feedback: Feedback, grades: Mapping[Source, float]
    ) -> Verdict:
        """Like `judge_feedback`; `grades`: earlier grades of the answer by other sources, each in [-1, 1]."""
        ...


Scorer = ResultVerifier | Judge | FeedbackJudge


class VerifierData(BaseModel):
    """Base class of verifier data: JSON in the task; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


D = TypeVar("D", bound=VerifierData)


def data_of(task: Task, model: type[D]) -> D:
    """Returns the verifier data of a task. Raises BadVerifierData, which names the invalid fields."""
    text = task.verifier.data if task.verifier is not None else "{}"
    try:
        return model.model_validate_json(text)
    except ValidationError as cause:
        name = task.verifier.name if task.verifier is not None else "(none)"
        invalid = problems(cause, "data")
        raise BadVerifierData(f"the data of the verifier {name!r} is not valid: {invalid}") from cause
