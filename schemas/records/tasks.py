"""Task, and the parts that other records share with it: messages, sampling, terms, the head of the task."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from schemas.records.base import Int, Millis, Name, Record, RecordPart, check_finite

MAX_SAMPLES = 256
"""The largest group (`n_samples`). All components have the same limit, so that every accepted task can be answered."""


class Message(RecordPart):
    """One chat message, as the policy sees it."""

    role: Name
    content: str


class Sampling(RecordPart):
    """The sampling parameters of an answer. `constrained`: a grammar restricts the tokens."""

    temperature: Annotated[float, AfterValidator(check_finite), Field(ge=0.0)] = 1.0
    top_p: Annotated[float, AfterValidator(check_finite), Field(gt=0.0, le=1.0)] = 1.0
    top_k: Int = 0
    max_tokens: Annotated[Int, Field(ge=1)] = 256
    stop: tuple[str, ...] = ()
    constrained: bool = False


class Verifier(RecordPart):
    """The rule that checks an answer: a registered name, and its data as JSON."""

    name: Name
    data: str = "{}"


class Source(StrEnum):
    """The origin of a half: the result itself, or a kind of feedback on it."""

    UNKNOWN = "unknown"
    RESULT = "result"
    MANAGER = "manager"
    USER = "user"
    NEXT_STATE = "next_state"
    ENVIRONMENT = "environment"
    OPERATOR = "operator"


class Opens(StrEnum):
    """The event at which a task opens: from then on it waits for halves."""

    UNKNOWN = "unknown"
    AT_ONCE = "at_once"
    FIRST_FEEDBACK = "first_feedback"


class Terms(RecordPart):
    """The halves that a task waits for, their sources, and the longest waits (ms, from append time on the log)."""

    rl: Source | None = Source.RESULT
    opd: Source | None = None
    opens: Opens = Opens.AT_ONCE
    deadline_ms: Annotated[int, Field(gt=0)] = 3_600_000
    opd_window_ms: Annotated[int, Field(gt=0)] = 30_000

    @model_validator(mode="after")
    def _check_sources(self) -> "Terms":
        if self.rl is None and self.opd is None:
            raise ValueError("terms must name a source for at least one half: rl, opd or both")
        if self.opd is Source.RESULT:
            raise ValueError("terms.opd must be a source of feedback, not 'result'")
        if self.opens is Opens.FIRST_FEEDBACK and self.rl is Source.RESULT:
            raise ValueError(
                "terms.rl must be a source of feedback, not 'result', if the task opens with the first feedback"
            )
        return self


class TaskHead(RecordPart):
    """The part of a task that its halves, outcomes and rollouts keep."""

    task_id: Name
    policy: Name
    environment: Name
    n_samples: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    terms: Terms
    manager_id: str = ""
    run_id: str | None = None
    session_id: str | None = None
    turn_index: Int | None = None
    user_id: str | None = None


class Task(Record):
    """A request to the agents for `n_samples` answers. All samples have one key: a group stays on one partition."""

    ID_FIELD = "task_id"
    task_id: Name
    event_time: Millis
    policy: Name
    environment: Name
    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    n_samples: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: Sampling = Sampling()
    verifier: Verifier | None = None
    terms: Terms = Terms()
    manager_id: str = ""
    target_worker: str | None = None
    run_id: str | None = None
    session_id: str | None = None
    turn_index: Int | None = None
    user_id: str | None = None
    metadata: dict[str, str] = {}

    @property
    def key(self) -> str:
        return self.task_id

    @property
    def answered(self) -> bool:
        """True for a turn of a conversation: it is answered already, and its next state is awaited."""
        return Source.NEXT_STATE in (self.terms.rl, self.terms.opd)

    @property
    def head(self) -> TaskHead:
        """The part of the task that its halves, outcomes and rollouts keep."""
        return TaskHead(
            task_id=self.task_id,
            policy=self.policy,
            environment=self.environment,
            n_samples=self.n_samples,
            terms=self.terms,
            manager_id=self.manager_id,
            run_id=self.run_id,
            session_id=self.session_id,
            turn_index=self.turn_index,
            user_id=self.user_id,
        )
