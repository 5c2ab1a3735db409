"""The data of the verifier: its input log, the problems that it finds, and its report."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from schemas.place import RecordPlace
from schemas.records import (
    BatchPlan,
    Feedback,
    Forget,
    Hint,
    Open,
    Outcome,
    PolicyUpdate,
    Record,
    Result,
    Rollout,
    RunManifest,
    Score,
    StepResult,
    Task,
)
from tentalis.kafka.loss_audit import AcceptedLoss

R = TypeVar("R", bound=Record, covariant=True)
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class LoggedRecord(Generic[R]):
    """A record with its place on the log; `timestamp` is its append time, milliseconds since the epoch."""

    record: R
    topic: str
    partition: int
    offset: int
    timestamp: int

    @property
    def place(self) -> RecordPlace:
        return RecordPlace(self.topic, self.partition, self.offset)

    def __str__(self) -> str:
        return str(self.place)


@dataclass(slots=True)
class Log:
    """All records of a run on the topics, in log order per partition, including repeats.

    `clock` is the stream time of each partition of the halves topic (its greatest append time, ms). `dead` are the
    places of records that a dead-letter topic has with unchanged bytes. `undecodable` are the places of records that
    cannot be decoded on topics whose owners always run, `unreadable` those on other topics. `manifests`, `plans` and
    `steps` are those of all runs of the policy, because a run may continue another. `feedback_horizon_ms` is the
    setting of scoring and hinting: the greatest distance in append time between feedback and a result that it does not
    carry. `losses` are the lost topics whose loss was accepted. `halves_moved`: the halves topic was moved to more
    partitions, so that offsets noted before are of another topic.
    """

    run: str
    feedback_horizon_ms: int = HOUR_MS
    tasks: list[LoggedRecord[Task]] = field(default_factory=list)
    results: list[LoggedRecord[Result]] = field(default_factory=list)
    feedback: list[LoggedRecord[Feedback]] = field(default_factory=list)
    opens: list[LoggedRecord[Open]] = field(default_factory=list)
    scores: list[LoggedRecord[Score]] = field(default_factory=list)
    hints: list[LoggedRecord[Hint]] = field(default_factory=list)
    forgets: list[LoggedRecord[Forget]] = field(default_factory=list)
    outcomes: list[LoggedRecord[Outcome]] = field(default_factory=list)
    rollouts: list[LoggedRecord[Rollout]] = field(default_factory=list)
    manifests: list[LoggedRecord[RunManifest]] = field(default_factory=list)
    plans: list[LoggedRecord[BatchPlan]] = field(default_factory=list)
    steps: list[LoggedRecord[StepResult]] = field(default_factory=list)
    updates: list[LoggedRecord[PolicyUpdate]] = field(default_factory=list)
    clock: dict[int, int] = field(default_factory=dict)
    dead: set[RecordPlace] = field(default_factory=set)
    undecodable: list[tuple[RecordPlace, str]] = field(default_factory=list)
    unreadable: list[tuple[RecordPlace, str]] = field(default_factory=list)
    halves_moved: bool = False
    losses: list[AcceptedLoss] = field(default_factory=list)


class ProblemKind(StrEnum):
    """A class of problems. DEAD: on a dead-letter topic, so not lost, but without an outcome until it is replayed."""

    OPEN = "open"
    LOST = "lost"
    DEAD = "dead"
    WRONG = "wrong"
    DUPLICATE = "duplicates"


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """A violation of a rule. `rule` names the rule, `where` the record, task, rollout or step."""

    kind: ProblemKind
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


@dataclass(slots=True)
class VerifyReport:
    """The contents of a run in numbers, and its problems."""

    run: str
    numbers: dict[str, int]
    outcomes: dict[str, int]
    problems: list[VerifyProblem]
    unreadable: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        kinds = Counter(problem.kind for problem in self.problems)
        return {
            "run": self.run,
            **self.numbers,
            "outcomes": self.outcomes,
            "unreadable": self.unreadable,
            **{kind.value: kinds[kind] for kind in ProblemKind},
            "problems": [
                {"kind": p.kind.value, "rule": p.rule, "where": p.where, "message": p.message} for p in self.problems
            ],
        }

    def counts(self) -> list[tuple[str, int]]:
        """Returns the rows (name, count) of the table."""
        kinds = Counter(problem.kind for problem in self.problems)
        rows = [(name.replace("_", " "), number) for name, number in self.numbers.items()]
        rows += [(f"outcomes {name}", number) for name, number in self.outcomes.items()]
        rows.append(("unreadable", len(self.unreadable)))
        return rows + [(f"problems {kind.value}", kinds[kind]) for kind in ProblemKind]
