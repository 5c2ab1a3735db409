"""The log of a run, indexed by task, by slot (task and sample) and by id."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from schemas.place import RecordPlace
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
from tentalis.ops.verify.losses import AcceptedLosses, lost_rollouts
from tentalis.ops.verify.model import Log, LoggedRecord

R = TypeVar("R", bound=Record)
K = TypeVar("K", bound=Hashable)
Slot = tuple[str, int]
Half = LoggedRecord[Score] | LoggedRecord[Hint]


def half_id(half: Score | Hint) -> str:
    """Returns the event id of a half."""
    return half.score_id if isinstance(half, Score) else half.hint_id


def says_something(half: Score | Hint) -> bool:
    """Returns True if a half can train: a known reward, or an accepted hint for an answer with tokens and status ok."""
    if isinstance(half, Score):
        return half.reward is not None
    return half.kind is HintKind.ACCEPTED and half.sample.status is Status.OK and bool(half.sample.token_ids)


def answers_terms(half: Score | Hint) -> bool:
    """Returns True if the half comes from the source that its task's terms name for it."""
    terms = half.sample.head.terms
    return half.source is (terms.rl if isinstance(half, Score) else terms.opd)


def grouped(seen: Iterable[LoggedRecord[R]], key: Callable[[R], K]) -> dict[K, list[LoggedRecord[R]]]:
    """Groups records by a key, in log order."""
    found: dict[K, list[LoggedRecord[R]]] = defaultdict(list)
    for item in seen:
        found[key(item.record)].append(item)
    return dict(found)


@dataclass(frozen=True, slots=True)
class Index:
    """The indexes of a log. Each mapping has all copies of a record in log order; the rules compare them.

    `lost_rollouts` are the ids of rollouts that were lost with their topic, whose loss was accepted.
    """

    log: Log
    tasks: Mapping[str, Sequence[LoggedRecord[Task]]]
    results: Mapping[str, Sequence[LoggedRecord[Result]]]
    results_of: Mapping[Slot, Sequence[LoggedRecord[Result]]]
    feedback: Mapping[str, Sequence[LoggedRecord[Feedback]]]
    opens: Mapping[str, Sequence[LoggedRecord[Open]]]
    halves: Mapping[str, Sequence[Half]]
    halves_of: Mapping[Slot, Sequence[Half]]
    half_at: Mapping[RecordPlace, Half]
    outcomes: Mapping[str, Sequence[LoggedRecord[Outcome]]]
    rollouts: Mapping[str, Sequence[LoggedRecord[Rollout]]]
    losses: AcceptedLosses
    lost_rollouts: frozenset[str]

    @classmethod
    def of(cls, log: Log) -> "Index":
        halves: list[Half] = sorted([*log.scores, *log.hints], key=lambda half: half.place)
        by_id: dict[str, list[Half]] = defaultdict(list)
        by_slot: dict[Slot, list[Half]] = defaultdict(list)
        for half in halves:
            sample = half.record.sample
            by_id[half_id(half.record)].append(half)
            by_slot[sample.head.task_id, sample.sample_index].append(half)
        losses = AcceptedLosses.of(log.losses)
        outcomes = grouped(log.outcomes, lambda outcome: outcome.outcome_key)
        rollouts = grouped(log.rollouts, lambda rollout: rollout.rollout_id)
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
            outcomes,
            rollouts,
            losses,
            lost_rollouts(losses, rollouts, outcomes, (plan.record for plan in log.plans)),
        )

    def main_outcome(self, slot: Slot) -> Outcome | None:
        """Returns the outcome of a sample that is neither late nor superseded, or None."""
        found = self.outcomes.get(f"{slot[0]}/{slot[1]}")
        return found[0].record if found else None

    def moved_half(self, event_id: str) -> Half | None:
        """Returns the half of an id, wherever it is, if the halves topic was moved; else None."""
        copies = self.halves.get(event_id) if self.log.halves_moved else None
        return copies[0] if copies else None

    def dead(self, copies: Iterable[LoggedRecord[R]]) -> bool:
        """Returns True if every copy of a record was dead-lettered."""
        return all(copy.place in self.log.dead for copy in copies)

    def live_tasks(self) -> dict[str, Task]:
        """Returns the tasks that were not dead-lettered, each once."""
        return {task_id: copies[0].record for task_id, copies in self.tasks.items() if not self.dead(copies)}

    def halves_lost(self, task_id: str) -> bool:
        """Returns True if halves of a task may be lost with their topic, whose loss was accepted."""
        first = self.tasks[task_id][0]
        return self.losses.halves_lost(first.partition, first.timestamp)

    def has_no_half(self, task: Task) -> bool:
        """Returns True if the log has nothing by which the join would know a task."""
        samples = (half for i in range(task.n_samples) for half in self.halves_of.get((task.task_id, i), ()))
        return task.task_id not in self.opens and not any(answers_terms(half.record) for half in samples)

    def forgotten(self, task: Task) -> bool:
        """Returns True if a Forget concerns the task's session or user; then its halves are rightly missing."""
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
