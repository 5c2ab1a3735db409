"""Finds losses of a run in its topics. Pure, and by ids only: a soak leaves millions of records.

A loss is: a sample without an outcome; an outcome without its rollout; a result or feedback without its score or hint;
a half with content that is in no rollout (unless late or superseded); a turn without a result or a lesson; an outcome
in no window.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import (
    Feedback,
    Hint,
    MetaSignal,
    Open,
    Opens,
    Outcome,
    OutcomeKind,
    Result,
    Rollout,
    Score,
    SessionEvent,
    SessionEventKind,
    Source,
    Task,
    Terms,
)
from schemas.wire.codec import Codec
from streams.apps.aggregation import processor as aggregation
from streams.apps.experience import processor as experience
from tentalis.kafka.consumer import Stored
from tentalis.ops.verify.index import says_something

TOPICS = (
    *(topics.TASKS, topics.SESSIONS, topics.RESULTS, topics.FEEDBACK),
    *(topics.HALVES, topics.OUTCOMES, topics.ROLLOUTS, topics.META),
)


def lost(read: Callable[[str], Iterable[Stored]], codec: Codec) -> list[str]:
    """One line for each loss.

    All turns must be trainable, all feedback must be on answered samples, and no user may have been forgotten.

    Args:
        read: reads all records of a topic, each partition in order.
    """
    seen = _Seen()
    for topic in TOPICS:
        for stored in read(topic):
            seen.take(stored, codec)
    return sorted(seen.lost())


@dataclass(slots=True)
class _Seen:
    """Ids of the sent records and of the applications' outputs. Scores and hints are recorded by the result or feedback
    that they answer, as "result ID" or "feedback ID"."""

    tasks: dict[str, tuple[Terms, int]] = field(default_factory=dict)
    turns: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    learnt: set[str] = field(default_factory=set)
    to_score: set[str] = field(default_factory=set)
    to_hint: set[str] = field(default_factory=set)
    scored: set[str] = field(default_factory=set)
    hinted: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)
    """The result id of each half with content."""
    used: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)
    outcomes: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    rollouts: set[str] = field(default_factory=set)
    signals: dict[str, MetaSignal] = field(default_factory=dict)

    def take(self, stored: Stored, codec: Codec) -> None:
        """Takes one record of any topic."""
        match stored.decode(codec):
            case Task() as task:
                self.tasks[task.task_id] = task.terms, task.n_samples
            case SessionEvent(kind=SessionEventKind.TURN, turn_type="main") as event:
                self.turns.add(turn_task_id(event.session_id, event.session_event_id))
            case Result() as result:
                self.answered.add(result.task.task_id)
                if result.task.terms.rl is Source.RESULT:
                    self.to_score.add(f"result {result.result_id}")
            case Feedback() as feedback:
                carried = feedback.result
                terms = self.tasks[feedback.task_id][0] if carried is None else carried.task.terms
                for source, owed in ((terms.rl, self.to_score), (terms.opd, self.to_hint)):
                    if feedback.source is source:
                        owed.add(f"feedback {feedback.feedback_id}")
            case Open() as opened:
                self.opened.add(opened.key)
            case Score() | Hint() as half:
                self._half(half, dict(stored.headers).get("ce_source"))
            case Outcome() as outcome:
                self._outcome(outcome)
            case Rollout() as rollout:
                self.rollouts.add(rollout.rollout_id)
                self.used |= {origin.half_id for origin in rollout.provenance}
            case MetaSignal() as signal:
                self.signals[signal.key] = signal

    def _half(self, half: Score | Hint, maker: bytes | None) -> None:
        self.opened.add(half.key)
        result, feedback = half.sample.result_id, half.feedback_id
        answers = f"result {result}" if feedback is None else f"feedback {feedback}"
        (self.scored if isinstance(half, Score) else self.hinted).add(answers)
        if says_something(half):
            self.said[half.event_id] = result
        if maker == experience.APP_ID.encode():
            self.learnt.add(half.key)

    def _outcome(self, outcome: Outcome) -> None:
        self.outcomes.add(outcome.key)
        if outcome.rollout_id is not None:
            self.named.add(outcome.rollout_id)
        if outcome.kind is OutcomeKind.LATE:
            self.late.add(str(outcome.half_id))
        elif outcome.kind is OutcomeKind.SUPERSEDED:
            self.superseded.add(str(outcome.result_id))

    def lost(self) -> list[str]:
        """One line for each loss."""
        # A task that opens with its first feedback and got none has no outcome.
        samples = {
            f"{task}/{index}"
            for task, (terms, n_samples) in self.tasks.items()
            if terms.opens is Opens.AT_ONCE or task in self.opened
            for index in range(n_samples)
        }
        samples |= {f"{turn}/0" for turn in self.turns}
        found = [f"{key} has no outcome" for key in samples - self.outcomes]
        found += [f"rollout {key} is named by an outcome but missing" for key in self.named - self.rollouts]
        found += [f"{what} was not scored" for what in self.to_score - self.scored]
        found += [f"{what} led to no hint" for what in self.to_hint - self.hinted]
        nothing = self.said.keys() - self.used - self.late
        found += [
            f"half {half} is in no rollout, and neither late nor superseded"
            for half in nothing
            if self.said[half] not in self.superseded
        ]
        found += [f"turn {turn} has no result" for turn in self.turns - self.answered]
        found += [f"turn {turn} was not learnt from" for turn in self.turns - self.learnt]
        counted = sum(sum(signal.outcomes.values()) for signal in self.signals.values())
        if counted != len(self.outcomes):
            found.append(f"{aggregation.APP_ID} counted {counted:,} of {len(self.outcomes):,} outcomes")
        return found
