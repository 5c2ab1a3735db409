"""Signals about the agents, beside the training data: MetaSignal, Skill, EvalResult, AuditRecord."""

from typing import Annotated

from pydantic import Field

from schemas.records.base import Finite, Int, Millis, Name, Record, Unit


class MetaSignal(Record):
    """One window of event time for a manager, worker and environment, from one partition of outcomes or of feedback.
    Readers merge the records of a window.

    `count` is the number of known rewards (their mean and variance are over it), `feedback_count` the number of graded
    feedback records.
    """

    manager_id: str
    worker_id: str
    partition: Annotated[Int, Field(ge=0)]
    event_time: Millis
    window_start: Millis
    window_ms: Annotated[int, Field(gt=0)]
    count: Annotated[int, Field(ge=0)]
    mean_reward: Finite | None = None
    reward_variance: Finite | None = None
    outcomes: dict[str, int] = {}
    feedback_count: Annotated[int, Field(ge=0)] = 0
    mean_feedback_score: Finite | None = None
    environment: str = ""
    feedback_variance: Finite | None = None

    @property
    def key(self) -> str:
        counted = "feedback" if self.feedback_count and not self.outcomes else "outcomes"
        return f"{self.manager_id}/{self.worker_id}/{self.environment}/{self.window_start}/{self.partition}/{counted}"


class Skill(Record):
    """A lesson in words, to be put into prompts."""

    ID_FIELD = "skill_id"
    skill_id: Name
    event_time: Millis
    name: Name
    text: Name
    category: str = "general"
    source_task_id: str | None = None
    source_score: Unit | None = None

    @property
    def key(self) -> str:
        return self.skill_id


class EvalResult(Record):
    """The evaluation of one scenario of an experiment."""

    ID_FIELD = "eval_id"
    eval_id: Name
    event_time: Millis
    experiment: Name
    scenario: Name
    worker_id: str = ""
    policy: str = ""
    passed: bool | None = None
    metrics: dict[str, Finite] = {}
    details: str = ""

    @property
    def key(self) -> str:
        return self.eval_id


class AuditRecord(Record):
    """One record seen on one topic: its position, id and hash."""

    ID_FIELD = "audit_id"
    audit_id: Name
    event_time: Millis
    component: Name
    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    record_type: Name
    record_id: Name
    sha256: Name

    @property
    def key(self) -> str:
        return self.audit_id
