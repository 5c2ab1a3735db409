"""What a verifier or a judge says, and the ways in which a task can be wrong about its scorer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problems
from schemas.records import Feedback, Result, Source, Task

CallSeconds = Annotated[float, Field(gt=0.0, le=100.0)]
"""How long one call may take. A worker that hears nothing for longer ends as hung (`StreamSettings.stall_limit`)."""


class RewardError(ValueError):
    """A task whose answers cannot be verified as it stands: a malformed record, not a bad answer."""


class UnknownEnvironment(RewardError):
    """An environment that is not registered."""


class UnknownVerifier(RewardError):
    """A verifier that the task's environment does not have."""


class BadVerifierData(RewardError):
    """Verifier data that the verifier cannot read."""


class ScorerAway(Exception):
    """What a judge asks is away (connection refused, overloaded, credentials refused): to be asked again when it is
    back, for as long as that takes. Nothing is wrong with the result."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """A step of an answer: tokens [start, end) of the sample (prompt and answer in one sequence), and its score."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward in [-1, 1], or None for *unknown*, and the named values it is made of (0/1 for yes/no).

    Unknown means that the verification failed, never that the answer is middling: `unverified` is then 1. `votes` are
    those of a judge that asked several times, `steps` those of one that looked at each step.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    votes: tuple[str, ...] = ()
    steps: tuple[ScoredStep, ...] = ()

    @classmethod
    def unknown(cls, **components: float) -> "Verdict":
        """The verdict of a verification that could not be carried out."""
        return cls(None, {"unverified": 1.0, **components})


class Verifier(Protocol):
    """One rule. Pure: the same task and result give the same verdict."""

    @property
    def name(self) -> str:
        """Name/version: part of the id of every Score it makes, so a changed rule needs a new version."""
        ...

    @property
    def slow(self) -> bool:
        """Whether `verify` may take long enough to hold up an event loop (more than about 10 ms)."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data is not what this verifier reads."""
        ...

    def verify(self, task: Task, result: Result) -> Verdict:
        """The verdict on an answer (status ok). Raises BadVerifierData."""
        ...

    def complaint(self, task: Task, result: Result) -> str | None:
        """One or two short sentences on what is wrong with an answer, or None. Raises BadVerifierData."""
        ...


@runtime_checkable
class Judge(Protocol):
    """A scorer that asks somebody else, a model for one. Asked for many results at a time, again after a failure or a
    time-out, and perhaps again after a restart: a call must have no effect but its answer."""

    @property
    def name(self) -> str:
        """Name/version: part of the id of every Score it makes, so another model or prompt needs a new version."""
        ...

    @property
    def time_limit_s(self) -> float:
        """Seconds that one call may take."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data is not what this judge reads."""
        ...

    async def judge(self, task: Task, result: Result) -> Verdict:
        """The verdict on an answer (status ok); `Verdict.unknown()` if it could not form one.

        Raises:
            ScorerAway: nobody can be asked now.
            Exception: this call failed; a few more are made before the reward is unknown.
        """
        ...


@runtime_checkable
class FeedbackJudge(Protocol):
    """A scorer that judges an answer by feedback: by what came next, or by who graded it. Asked as a Judge is.

    It is asked where the reward answers to a feedback source that is one of its own, about the feedback from there that
    does not bring a grade with it.
    """

    @property
    def name(self) -> str:
        """As a Judge's."""
        ...

    @property
    def time_limit_s(self) -> float:
        """As a Judge's."""
        ...

    @property
    def sources(self) -> frozenset[Source]:
        """The sources whose feedback it judges by."""
        ...

    @property
    def grades(self) -> bool:
        """Whether it is asked about graded feedback too, and makes the grade a part of the reward."""
        ...

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data, or its terms, are not what this judge can work with."""
        ...

    async def judge_feedback(self, task: Task, result: Result, feedback: Feedback) -> Verdict:
        """The verdict on an answer (status ok); raises as `Judge.judge` does."""
        ...


@runtime_checkable
class GradingJudge(FeedbackJudge, Protocol):
    """A FeedbackJudge that makes the grades of others parts of the reward."""

    @property
    def graders(self) -> frozenset[Source]:
        """Whose."""
        ...

    async def judge_grades(
        self, task: Task, result: Result, feedback: Feedback, grades: Mapping[Source, float]
    ) -> Verdict:
        """As `judge_feedback`; `grades`: what the other sources said of the answer before, each in [-1, 1]."""
        ...


Scorer = Verifier | Judge | FeedbackJudge


class Data(BaseModel):
    """Base of verifier data: JSON in the task, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


D = TypeVar("D", bound=Data)


def data_of(task: Task, model: type[D]) -> D:
    """The verifier data of a task. Raises BadVerifierData naming the fields that are wrong."""
    text = task.verifier.data if task.verifier is not None else "{}"
    try:
        return model.model_validate_json(text)
    except ValidationError as cause:
        name = task.verifier.name if task.verifier is not None else "(none)"
        wrong = problems(cause, "data")
        raise BadVerifierData(f"the data of the verifier {name!r} is not what it reads: {wrong}") from cause
