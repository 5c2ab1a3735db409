"""Conversations as they are on the log. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schemas.ids import graded_sample, turn_task_id
from schemas.records import EXPLICIT, Feedback, Hint, HintKind, Outcome, Record, SessionEvent, SessionEventKind, Source
from tentalis.gateway.api.mapping import hint_answer, no_task_reason
from tentalis.gateway.calls.session_id import MAIN

R = TypeVar("R", bound=Record)
SIGNAL = "signal:"
"""Prefix of the author of a feedback that is an implicit signal."""


class UnknownSession(Exception):
    """The log has no turn of a session."""


class NoSuchTurn(Exception):
    """A session has no such main turn, or the turn has no task that feedback could name."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One call of a conversation. `index`: its number among the main turns, as `sessions` counts them; None for a side
    turn. `at`: append time (ms)."""

    event: SessionEvent
    index: int | None
    at: int

    @property
    def task_id(self) -> str | None:
        """The task that `sessions` makes of the turn; None if the turn itself shows that it makes none."""
        if self.no_task:
            return None
        return turn_task_id(self.event.session_id, self.event.session_event_id)

    @property
    def no_task(self) -> str:
        """The reason why the turn has no task; "" if it has one."""
        return no_task_reason(self.event)


@dataclass(slots=True)
class Conversation:
    """One session of one user. The same session id under two users is two conversations."""

    session_id: str
    user_id: str | None
    turns: list[RecordedTurn] = field(default_factory=list)
    ended: bool = False

    @property
    def main_turns(self) -> list[RecordedTurn]:
        return [turn for turn in self.turns if turn.index is not None]

    def main_turn(self, index: int) -> RecordedTurn:
        """Returns the main turn of this number. Raises NoSuchTurn."""
        turns = self.main_turns
        if not 0 <= index < len(turns):
            raise NoSuchTurn(
                f"session {self.session_id} has {len(turns)} main turns, numbered from 0; there is no {index}"
            )
        return turns[index]

    def row(self) -> dict[str, Any]:
        """One line of `tentalis sessions list`."""
        main = self.main_turns
        return {
            "session": self.session_id,
            "user": self.user_id,
            "main": len(main),
            "side": len(self.turns) - len(main),
            "tasks": sum(turn.task_id is not None for turn in main),
            "policies": sorted({turn.event.policy for turn in self.turns if turn.event.policy}),
            "ended": self.ended,
            "first": self.turns[0].at if self.turns else None,
            "last": self.turns[-1].at if self.turns else None,
        }


class SessionsView:
    """The fold over session events, in the order of each partition. An event that is on the log twice counts once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], Conversation] = {}
        self._seen: set[str] = set()

    def apply(self, event: SessionEvent, at: int) -> None:
        """Adds an event with its append time (ms)."""
        if event.session_event_id in self._seen or event.kind is SessionEventKind.UNKNOWN:
            return
        self._seen.add(event.session_event_id)
        place = event.session_id, event.user_id
        found = self._found.get(place)
        if event.kind is SessionEventKind.END:
            if found is not None:
                found.ended = True
            return
        if found is None:
            found = self._found[place] = Conversation(*place)
        index = len(found.main_turns) if event.turn_type == MAIN else None
        found.turns.append(RecordedTurn(event, index, at))
        found.ended = event.done

    @property
    def conversations(self) -> list[Conversation]:
        """All conversations, the one with the newest turn first."""
        return sorted(self._found.values(), key=lambda each: -each.turns[-1].at)


@dataclass(frozen=True, slots=True)
class TrainedAt:
    """The step that trained a rollout, and the version that it made. `reward`: it trained on the reward, and not on the
    hint alone."""

    run_id: str
    step: int
    version: str
    reward: bool = True


@dataclass(slots=True)
class TurnFacts:
    """The records after a turn: feedback, hints, outcomes, and the steps that trained its rollouts, by rollout id."""

    feedback: list[Feedback] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    trained: dict[str, TrainedAt] = field(default_factory=dict)

    @property
    def signals(self) -> dict[str, int]:
        """The number of implicit signals, by name."""
        authors = (each.author for each in self.feedback if each.source is Source.ENVIRONMENT)
        return dict(Counter(author.removeprefix(SIGNAL) for author in authors if author.startswith(SIGNAL)))

    def as_dict(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {
            "signals": self.signals,
            "feedback": [
                {
                    "source": each.source.value,
                    "author": each.author,
                    "verdict": each.polarity.value if each.score is None else each.score,
                    "text": each.text,
                }
                for each in self.feedback
                if not each.author.startswith(SIGNAL)
            ],
            "hints": [self._hint(each) for each in self.hints if each.kind is not HintKind.NONE],
            "outcomes": [
                {
                    "kind": each.kind.value,
                    "reward": each.reward,
                    "explicit": EXPLICIT in each.components,
                    "grade": self._late_grade(each.rollout_id),
                }
                for each in self.outcomes
            ],
            "trained": [
                {"rollout": rollout, "run": at.run_id, "step": at.step, "version": at.version}
                for rollout, at in sorted(self.trained.items())
            ],
        }

    def _late_grade(self, rollout_id: str | None) -> str | None:
        """Tells what became of a grade that came late; None for any other rollout."""
        sample = None if rollout_id is None else graded_sample(rollout_id)
        if sample is None:
            return None
        if rollout_id in self.trained:
            return "trained"
        others = (at for key, at in self.trained.items() if at.reward and (graded_sample(key) or key) == sample)
        other = next(others, None)
        if other is None:
            return "not trained yet"
        return f"not used: {other.version} has learned from the turn"

    def _hint(self, hint: Hint) -> dict[str, Any]:
        """A hint with its source: `made_by`, the rule or judge; `said`, the message or comment it was made from, null
        for the lesson of a whole session and for feedback that is no longer on the log."""
        found = next((each for each in self.feedback if each.feedback_id == hint.feedback_id), None)
        return hint_answer(hint, found).model_dump(exclude={"sample_index"})


def turn_details(turn: RecordedTurn, facts: TurnFacts) -> dict[str, Any]:
    """Everything that is known about a turn."""
    event = turn.event
    return {
        "turn": turn.index,
        "kind": event.turn_type,
        "decided_by": event.decided_by,
        "at": turn.at,
        "model": event.model,
        "asked": event.messages[-1].content if event.messages else "",
        "answered": event.response,
        "status": event.status.value,
        "task_id": turn.task_id,
        "no_task": turn.no_task or None,
    } | facts.as_dict()


def unique(found: Iterable[R]) -> list[R]:
    """Returns records without copies: each event id once, the first one on the log."""
    first: dict[str, R] = {}
    for each in found:
        first.setdefault(each.event_id, each)
    return list(first.values())
