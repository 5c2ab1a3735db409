"""The history of a gateway's requests as lines: each turn, and what was learned from it. Pure.

`entry_of` reduces a record to what a line needs; `LearnedTail` adds what earlier entries say: the session of a task,
the words behind a hint, and the rollouts of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from schemas.ids import policy_name, turn_task_id
from schemas.records import (
    EXPLICIT,
    BatchPlan,
    Feedback,
    Hint,
    HintKind,
    Outcome,
    Record,
    Score,
    SessionEvent,
    SessionEventKind,
    Source,
    StepResult,
    TaskHead,
)
from tentalis.gateway.api.mapping import hint_answer, no_task_reason
from tentalis.ops.sessions.core import SIGNAL

MOST_REMEMBERED = 20_000
"""Maximum number of tasks, rollouts, feedback records, plans and event ids that are remembered, each."""
MOST_SOURCE_CHARS = 2_000
"""Maximum length of the words behind a hint, in a line about the hint."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """The turn that a line is about. `index`: its number among the main turns; None until `sessions` has linked it."""

    session_id: str
    user_id: str | None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class LearnedEntry:
    """One record, reduced. `place`: None if the record does not name the session of its task. `link`: the plan of a
    plan or step, the rollout of an outcome, the feedback of a feedback or hint."""

    at: int
    event: str
    event_id: str
    task_id: str | None = None
    place: TurnPlace | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    link: str | None = None
    rollouts: tuple[str, ...] = ()


def entry_of(record: Record, at: int) -> LearnedEntry | None:
    """Reduces a record with its append time (ms); None if it says nothing about a turn of a conversation."""
    match record:
        case SessionEvent():
            return _session_entry(record, at)
        case Feedback():
            return _feedback_entry(record, at)
        case Hint() if record.kind is not HintKind.NONE:
            detail = hint_answer(record, None).model_dump(exclude={"sample_index"})
            return _of_head(record, at, "hint", record.sample.head, detail, record.feedback_id)
        case Score():
            detail = {"reward": record.reward, "source": record.source.value, "scorer": record.scorer}
            return _of_head(record, at, "score", record.sample.head, detail, record.feedback_id)
        case Outcome():
            return _of_head(record, at, "outcome", record.head, _outcome_detail(record), record.rollout_id)
        case BatchPlan():
            rollouts = tuple(row.rollout_id for row in record.rows)
            return LearnedEntry(at, "plan", record.event_id, link=record.plan_id, rollouts=rollouts)
        case StepResult():
            version = policy_name(record.policy, record.policy_version)
            detail = {"run": record.run_id, "step": record.step, "version": version}
            return LearnedEntry(at, "trained", record.event_id, detail=detail, link=record.plan_id)
    return None


def _session_entry(event: SessionEvent, at: int) -> LearnedEntry | None:
    place = TurnPlace(event.session_id, event.user_id)
    if event.kind is SessionEventKind.END:
        return LearnedEntry(at, "end", event.event_id, place=place)
    if event.kind is not SessionEventKind.TURN:
        return None
    no_task = no_task_reason(event)
    detail = {
        "kind": event.turn_type,
        "decided_by": event.decided_by,
        "model": event.model,
        "asked": event.messages[-1].content if event.messages else "",
        "answered": event.response,
        "status": event.status.value,
        "no_task": no_task or None,
    }
    task_id = None if no_task else turn_task_id(event.session_id, event.session_event_id)
    return LearnedEntry(at, "turn", event.event_id, task_id, place, detail)


def _feedback_entry(feedback: Feedback, at: int) -> LearnedEntry | None:
    head = None if feedback.result is None else feedback.result.task.head
    if head is not None and head.session_id is None:
        return None
    place = None if head is None else _place_of(head)
    verdict = feedback.polarity.value if feedback.score is None else feedback.score
    detail: dict[str, Any]
    if feedback.source is Source.ENVIRONMENT and feedback.author.startswith(SIGNAL):
        detail = {"signal": feedback.author.removeprefix(SIGNAL), "verdict": verdict}
        return LearnedEntry(at, "signal", feedback.event_id, feedback.task_id, place, detail, feedback.feedback_id)
    detail = {
        "source": feedback.source.value,
        "author": feedback.author,
        "verdict": verdict,
        "text": feedback.text,
    }
    return LearnedEntry(at, "feedback", feedback.event_id, feedback.task_id, place, detail, feedback.feedback_id)


def _outcome_detail(outcome: Outcome) -> dict[str, Any]:
    return {
        "kind": outcome.kind.value,
        "reward": outcome.reward,
        "explicit": EXPLICIT in outcome.components,
        "rollout": outcome.rollout_id,
        "not_trainable": outcome.not_trainable,
    }


def _of_head(
    record: Record, at: int, event: str, head: TaskHead, detail: dict[str, Any], link: str | None
) -> LearnedEntry | None:
    place = _place_of(head)
    return None if place is None else LearnedEntry(at, event, record.event_id, head.task_id, place, detail, link)


def _place_of(head: TaskHead) -> TurnPlace | None:
    """The turn of a task; None for a task that is not of a conversation."""
    return None if head.session_id is None else TurnPlace(head.session_id, head.user_id, head.turn_index)


class _Newest(Generic[K, V]):
    """A dictionary of the entries that were set last."""

    def __init__(self, most: int) -> None:
        self._most, self._entries = most, OrderedDict[K, V]()

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class LearnedTail:
    """Makes lines of entries, in the order in which they are given.

    An event that is on the log twice counts once. A step is shown for the rollouts whose outcome came before it.

    Attributes:
        unattributed: the number of feedback records of tasks whose session no entry has named.
    """

    def __init__(self, user_id: str | None = None, session_id: str | None = None, most: int = MOST_REMEMBERED) -> None:
        self._user_id, self._session_id = user_id, session_id
        self._seen = _Newest[tuple[str, str], None](most)
        self._places = _Newest[str, TurnPlace](most)
        self._said = _Newest[str, dict[str, Any]](most)
        self._tasks_of_rollouts = _Newest[str, str](most)
        self._plans = _Newest[str, tuple[str, ...]](most)
        self.unattributed = 0

    def lines(self, entry: LearnedEntry) -> list[dict[str, Any]]:
        """Returns the lines of the next entry: none for a plan, one for each rollout that a step trained."""
        if (entry.event, entry.event_id) in self._seen:
            return []
        self._seen.put((entry.event, entry.event_id), None)
        if entry.event == "plan":
            known = tuple(rollout for rollout in entry.rollouts if rollout in self._tasks_of_rollouts)
            if known and entry.link is not None:
                self._plans.put(entry.link, known)
            return []
        if entry.event == "trained":
            return self._trained(entry)
        place = self._learn_place(entry)
        if place is None:
            self.unattributed += 1
            return []
        return self._shown(entry.at, entry.event, entry.task_id, place, self._with_links(entry))

    def _learn_place(self, entry: LearnedEntry) -> TurnPlace | None:
        task_id = entry.task_id
        known = None if task_id is None else self._places.get(task_id)
        place = entry.place
        if place is None or (place.index is None and known is not None):
            place = known
        if place is not None and task_id is not None:
            self._places.put(task_id, place)
        return place

    def _with_links(self, entry: LearnedEntry) -> dict[str, Any]:
        """The detail of an entry, a hint's with the words that it was made from."""
        if entry.link is None:
            return entry.detail
        if entry.event == "feedback":
            said = {name: entry.detail[name] for name in ("source", "author", "text")}
            text = said["text"]
            self._said.put(entry.link, said | {"text": text[:MOST_SOURCE_CHARS]})
        elif entry.event == "hint":
            return entry.detail | {"said": self._said.get(entry.link)}
        elif entry.event == "outcome" and entry.task_id is not None:
            self._tasks_of_rollouts.put(entry.link, entry.task_id)
        return entry.detail

    def _trained(self, entry: LearnedEntry) -> list[dict[str, Any]]:
        lines = []
        for rollout in (entry.link is not None and self._plans.get(entry.link)) or ():
            task_id = self._tasks_of_rollouts.get(rollout)
            place = None if task_id is None else self._places.get(task_id)
            if place is not None:
                lines += self._shown(entry.at, entry.event, task_id, place, {"rollout": rollout} | entry.detail)
        return lines

    def _shown(
        self, at: int, event: str, task_id: str | None, place: TurnPlace, detail: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """One line; none if it is of another user or session."""
        if self._user_id not in (None, place.user_id) or self._session_id not in (None, place.session_id):
            return []
        about = {"session": place.session_id, "user": place.user_id, "turn": place.index, "task": task_id}
        return [{"at": at, "event": event} | about | detail]
