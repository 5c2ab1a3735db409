"""What the verifier reads, what it finds, and what it says."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from schemas.place import Place
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

R = TypeVar("R", bound=Record, covariant=True)
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Seen(Generic[R]):
    """A record and where it lies; `timestamp` is its append time, milliseconds since the epoch."""

    record: R
    topic: str
    partition: int
    offset: int
    timestamp: int

    @property
    def place(self) -> Place:
        return Place(self.topic, self.partition, self.offset)

    def __str__(self) -> str:
        return str(self.place)


@dataclass(slots=True)
class Log:
    """Everything on the topics that concerns a run, in log order per partition, repeats included.

    `clock` is the stream time of each partition of the halves topic (its greatest append time, ms). `dead` are the
    places of records that lie on a dead-letter topic with their bytes unchanged, `undecodable` those of bytes that are
    no record on topics whose owners always run, `unreadable` those elsewhere. `manifests`, `plans` and `steps` are
    those of all runs of the policy: a run may go on from another. `feedback_horizon_ms` is what scoring and hinting run
    with: how far (append time) feedback and a result that it does not carry may be apart.
    """

    run: str
    feedback_horizon_ms: int = HOUR_MS
    tasks: list[Seen[Task]] = field(default_factory=list)
    results: list[Seen[Result]] = field(default_factory=list)
    feedback: list[Seen[Feedback]] = field(default_factory=list)
    opens: list[Seen[Open]] = field(default_factory=list)
    scores: list[Seen[Score]] = field(default_factory=list)
    hints: list[Seen[Hint]] = field(default_factory=list)
    forgets: list[Seen[Forget]] = field(default_factory=list)
    outcomes: list[Seen[Outcome]] = field(default_factory=list)
    rollouts: list[Seen[Rollout]] = field(default_factory=list)
    manifests: list[Seen[RunManifest]] = field(default_factory=list)
    plans: list[Seen[BatchPlan]] = field(default_factory=list)
    steps: list[Seen[StepResult]] = field(default_factory=list)
    updates: list[Seen[PolicyUpdate]] = field(default_factory=list)
    clock: dict[int, int] = field(default_factory=dict)
    dead: set[Place] = field(default_factory=set)
    undecodable: list[tuple[Place, str]] = field(default_factory=list)
    unreadable: list[tuple[Place, str]] = field(default_factory=list)


class Kind(StrEnum):
    OPEN = "open"
    LOST = "lost"
    WRONG = "wrong"
    DUPLICATE = "duplicates"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be. `rule` names the rule, `where` the record, task, rollout or step."""

    kind: Kind
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


@dataclass(slots=True)
class Report:
    """What a run consists of, and what is wrong with it."""

    run: str
    numbers: dict[str, int]
    outcomes: dict[str, int]
    problems: list[Problem]
    unreadable: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        kinds = Counter(problem.kind for problem in self.problems)
        return {
            "run": self.run,
            **self.numbers,
            "outcomes": self.outcomes,
            "unreadable": self.unreadable,
            **{kind.value: kinds[kind] for kind in Kind},
            "problems": [
                {"kind": p.kind.value, "rule": p.rule, "where": p.where, "message": p.message} for p in self.problems
            ],
        }

    def counts(self) -> list[tuple[str, int]]:
        """(what, how many) for the table."""
        kinds = Counter(problem.kind for problem in self.problems)
        rows = [(name.replace("_", " "), number) for name, number in self.numbers.items()]
        rows += [(f"outcomes {name}", number) for name, number in self.outcomes.items()]
        rows.append(("unreadable", len(self.unreadable)))
        return rows + [(f"problems {kind.value}", kinds[kind]) for kind in Kind]
