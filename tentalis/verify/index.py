"""The log of a run, indexed: by task, by slot (task and sample), by id."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from schemas.place import Place
from schemas.records import (
    Feedback,
    Hint,
    HintKind,
    Open,
    Outcome,
    Record,
    Result,
    Rollout,
    Score,
    Status,
    Task,
)
from tentalis.verify.model import Log, Seen

R = TypeVar("R", bound=Record)
K = TypeVar("K", bound=Hashable)
Slot = tuple[str, int]
Half = Seen[Score] | Seen[Hint]


def half_id(half: Score | Hint) -> str:
    """The event id of a half."""
    return half.score_id if isinstance(half, Score) else half.hint_id


def says_something(half: Score | Hint) -> bool:
    """Whether a half has anything to train on: a known reward, or an accepted hint on the tokens of a sound answer."""
    if isinstance(half, Score):
        return half.reward is not None
    return half.kind is HintKind.ACCEPTED and half.sample.status is Status.OK and bool(half.sample.token_ids)


def answers_terms(half: Score | Hint) -> bool:
    """Whether the half comes from the source that its task's terms name for it."""
    terms = half.sample.head.terms
    return half.source is (terms.rl if isinstance(half, Score) else terms.opd)


def grouped(seen: Iterable[Seen[R]], key: Callable[[R], K]) -> dict[K, list[Seen[R]]]:
    """Records by a key, in log order."""
    found: dict[K, list[Seen[R]]] = defaultdict(list)
    for item in seen:
        found[key(item.record)].append(item)
    return dict(found)


@dataclass(frozen=True, slots=True)
class Index:
    """Every mapping keeps all copies in log order; what the copies must have in common is for the rules to say."""

    log: Log
    tasks: Mapping[str, Sequence[Seen[Task]]]
    results: Mapping[str, Sequence[Seen[Result]]]
    results_of: Mapping[Slot, Sequence[Seen[Result]]]
    feedback: Mapping[str, Sequence[Seen[Feedback]]]
    opens: Mapping[str, Sequence[Seen[Open]]]
    halves: Mapping[str, Sequence[Half]]
    halves_of: Mapping[Slot, Sequence[Half]]
    half_at: Mapping[Place, Half]
    outcomes: Mapping[str, Sequence[Seen[Outcome]]]
    rollouts: Mapping[str, Sequence[Seen[Rollout]]]

    @classmethod
    def of(cls, log: Log) -> "Index":
        halves: list[Half] = sorted([*log.scores, *log.hints], key=lambda half: half.place)
        by_id: dict[str, list[Half]] = defaultdict(list)
        by_slot: dict[Slot, list[Half]] = defaultdict(list)
        for half in halves:
            sample = half.record.sample
            by_id[half_id(half.record)].append(half)
            by_slot[sample.head.task_id, sample.sample_index].append(half)
        return cls(
            log,
            grouped(log.tasks, lambda task: task.task_id),
            grouped(log.results, lambda result: result.result_id),
            grouped(log.results, lambda result: (result.task.task_id, result.sample_index)),
            grouped(log.feedback, lambda feedback: feedback.feedback_id),
            grouped(log.opens, lambda open_: open_.head.task_id),
            dict(by_id),
            dict(by_slot),
            {half.place: half for half in halves},
            grouped(log.outcomes, lambda outcome: outcome.outcome_key),
            grouped(log.rollouts, lambda rollout: rollout.rollout_id),
        )

    def main_outcome(self, slot: Slot) -> Outcome | None:
        """The one outcome of a sample."""
        found = self.outcomes.get(f"{slot[0]}/{slot[1]}")
        return found[0].record if found else None

    def dead(self, copies: Iterable[Seen[R]]) -> bool:
        """Whether every copy of a record was dead-lettered."""
        return all(copy.place in self.log.dead for copy in copies)

    def live_tasks(self) -> dict[str, Task]:
        """The tasks that were not dead-lettered, each once."""
        return {task_id: copies[0].record for task_id, copies in self.tasks.items() if not self.dead(copies)}

    def forgotten(self, task: Task) -> bool:
        """Whether somebody asked to forget the task's session or user: its halves are gone then, as they should."""
        requests = [seen.record for seen in self.log.forgets]
        opened = self.tasks[task.task_id][0].timestamp
        return any(
            (request.session_id, request.user_id, request.before) != (None, None, None)
            and request.session_id in (None, task.session_id)
            and request.user_id in (None, task.user_id)
            and request.policy in (None, task.policy)
            and (request.before is None or opened < request.before)
            for request in requests
        )
