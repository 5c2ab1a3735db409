"""The decisions of a rescoring: which answers are scored, and by what. Pure."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from schemas.ids import rollout_task_id
from schemas.records import BatchPlan, Forget, Record, Result, Score, Task

_LABEL = re.compile(r"(?P<environment>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<version>[\w.+-]+))?")


class BadScorerLabel(ValueError):
    """A scorer that cannot be used; the message says what to name."""


class NothingToScore(Exception):
    """The log has no results of the run in the environment."""


@dataclass(frozen=True, slots=True)
class ScorerLabel:
    """The name of new scores, ENVIRONMENT/NAME@VERSION. It is the `scorer` of each of them.

    >>> str(ScorerLabel.parse("swe/tests@2"))
    'swe/tests@2'
    """

    environment: str
    name: str
    version: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a label; the version may be missing. Raises BadScorerLabel."""
        found = _LABEL.fullmatch(text)
        if found is None:
            raise BadScorerLabel(f"{text!r} is not a scorer: write ENVIRONMENT/NAME@VERSION, such as swe/tests@2")
        return cls(found["environment"], found["name"], found["version"])

    def __str__(self) -> str:
        return f"{self.environment}/{self.name}" + ("" if self.version is None else f"@{self.version}")


@dataclass(frozen=True, slots=True)
class RescoredRow:
    """The result of rescoring one answer. `left_out`: the reason why it has no new score."""

    task_id: str
    sample_index: int
    result_id: str
    old: float | None
    new: float | None
    left_out: str | None = None


@dataclass(slots=True)
class ScoredAnswers:
    """The scores that the log has: folded from the halves.

    `old`: reward by result, of the first Score from another scorer than `label`. `done`: results that `label` has
    scored. An answer without an old score is not scored: the join would take the new one for the first.
    """

    label: str
    old: dict[str, float | None] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    _requests: list[Forget] = field(default_factory=list)

    def apply(self, record: Record) -> None:
        """Applies a record of the halves log."""
        match record:
            case Score(scorer=scorer, sample=sample) if scorer == self.label:
                self.done.add(sample.result_id)
            case Score():
                self.old.setdefault(record.sample.result_id, record.reward)
            case Forget():
                self._requests.append(record)
            case _:
                pass

    def left_out(self, result: Result) -> str | None:
        """Returns the reason not to score an answer, or None."""
        if any(request.concerns(result.task.head, result.opened_at) for request in self._requests):
            return "its user or session was erased"
        if result.result_id not in self.old:
            return "it has no score yet: it can be scored again when its first one is on the log"
        return None


def planned_tasks(plan: BatchPlan) -> set[str]:
    """Returns the tasks of the rollouts of a plan."""
    return {rollout_task_id(row.rollout_id) for row in plan.rows}


def is_of_run(task: Task, run_id: str, planned: Collection[str]) -> bool:
    """Returns True for a task of the run, or one whose rollouts the run has planned."""
    return task.run_id == run_id or task.task_id in planned
