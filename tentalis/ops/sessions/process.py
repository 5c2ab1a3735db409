"""Reads conversations and what followed their turns, and writes the Feedback of a label."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from schemas import topics
from schemas.ids import policy_name
from schemas.records import BatchPlan, Feedback, Hint, Outcome, PlanRow, Record, Result, SessionEvent, StepResult
from schemas.wire.codec import Codec, DecodeError
from tentalis.gateway.api.bodies import UserFeedbackBody
from tentalis.gateway.api.mapping import user_feedback_of
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.offsets import offsets_at
from tentalis.kafka.producer import Publisher
from tentalis.ops.sessions.core import (
    Conversation,
    NoSuchTurn,
    RecordedTurn,
    SessionsView,
    TrainedAt,
    TurnFacts,
    UnknownSession,
    unique,
)
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms


def read_sessions(settings: Settings, since_ms: int | None = None) -> SessionsView:
    """Returns the conversations; with `since_ms`, only from events that were appended since. Raises NoSuchTopic."""
    return _view(settings, make_codec(settings), since_ms, lambda key: True)


def read_session(settings: Settings, session_id: str, user_id: str | None = None) -> Conversation:
    """Returns one conversation. `user_id`: needed only if several users have this session id. Raises UnknownSession."""
    view = _view(settings, make_codec(settings), None, lambda key: key == session_id)
    found = [each for each in view.conversations if user_id in (None, each.user_id)]
    if not found:
        raise UnknownSession(
            f"the log has no turn of session {session_id!r}. On the log the id begins with its user: USER/NAME; "
            "`tentalis sessions list` lists them"
        )
    if len(found) > 1:
        users = ", ".join(str(each.user_id) for each in found)
        raise UnknownSession(f"several users have a session {session_id!r}: name one with --user: {users}")
    return found[0]


def _view(settings: Settings, codec: Codec, since_ms: int | None, wanted: Callable[[str | None], bool]) -> SessionsView:
    start: dict[int, int] = {}
    if since_ms is not None:
        # A partition without a record since then is skipped: its first offset to read is past its end.
        start = {p: 2**62 if o is None else o for p, o in offsets_at(settings, topics.SESSIONS, since_ms).items()}
    view = SessionsView()
    for stored, record in _records(settings, codec, topics.SESSIONS, wanted, start):
        if isinstance(record, SessionEvent):
            view.apply(record, stored.timestamp)
    return view


def _records(
    settings: Settings,
    codec: Codec,
    topic: str,
    wanted: Callable[[str | None], bool],
    start: dict[int, int] | None = None,
) -> Iterator[tuple[Stored, Record]]:
    """Yields the decodable records with a wanted key; their applications dead-letter the others."""
    for stored in read_to_end(settings, topic, start=start):
        if stored.value is None or not wanted(stored.key):
            continue
        try:
            yield stored, stored.decode(codec)
        except DecodeError:
            continue


def read_facts(settings: Settings, conversation: Conversation) -> dict[str, TurnFacts]:
    """Returns what followed the turns of a conversation, by task id."""
    codec = make_codec(settings)
    facts = {task_id: TurnFacts() for turn in conversation.turns if (task_id := turn.task_id) is not None}
    for _, record in _records(settings, codec, topics.FEEDBACK, facts.__contains__):
        if isinstance(record, Feedback):
            facts[record.task_id].feedback.append(record)
    for _, record in _records(settings, codec, topics.HALVES, facts.__contains__, _since(settings, conversation)):
        if isinstance(record, Hint):
            facts[record.key].hints.append(record)
    newest: dict[str, Outcome] = {}
    for _, record in _records(settings, codec, topics.OUTCOMES, lambda key: (key or "").split("/")[0] in facts):
        if isinstance(record, Outcome):
            newest[record.outcome_key] = record
    for outcome in newest.values():
        facts[outcome.head.task_id].outcomes.append(outcome)
    rollouts = {outcome.rollout_id: outcome.head.task_id for outcome in newest.values() if outcome.rollout_id}
    for rollout, at in _trained(settings, codec, rollouts).items():
        facts[rollouts[rollout]].trained[rollout] = at
    for each in facts.values():
        each.feedback, each.hints = unique(each.feedback), unique(each.hints)
    return facts


def _since(settings: Settings, conversation: Conversation) -> dict[int, int]:
    """The first offsets of the halves that can belong to a conversation: they are written after its turns."""
    first = min((turn.at for turn in conversation.turns), default=0)
    return {p: 2**62 if o is None else o for p, o in offsets_at(settings, topics.HALVES, first).items()}


def _trained(settings: Settings, codec: Codec, rollouts: Collection[str]) -> dict[str, TrainedAt]:
    """Returns the steps that trained these rollouts: those of plans whose result counts."""
    if not rollouts:
        return {}
    plans: dict[str, list[PlanRow]] = {}
    results: dict[tuple[str, int], StepResult] = {}
    for _, record in _records(settings, codec, topics.BATCHES, lambda key: True):
        if isinstance(record, BatchPlan):
            rows = [row for row in record.rows if row.rollout_id in rollouts]
            if rows:
                plans[record.plan_id] = rows
        elif isinstance(record, StepResult):
            results[record.run_id, record.step] = record
    return {
        row.rollout_id: TrainedAt(
            result.run_id, result.step, policy_name(result.policy, result.policy_version), reward=row.rl
        )
        for result in results.values()
        for row in plans.get(result.plan_id or "", ())
    }


def label_of(settings: Settings, turn: RecordedTurn, body: UserFeedbackBody, author: str) -> Feedback:
    """Returns the Feedback of a label, with the turn's result if it is on the log: as the bridge makes it of a POST to
    /v1/feedback. Raises NoSuchTurn if the turn has no task."""
    task_id = turn.task_id
    if task_id is None:
        raise NoSuchTurn(f"turn {turn.index} of {turn.event.session_id} has no task to label: {turn.no_task}")
    result: Result | None = None
    codec = make_codec(settings)
    # The result is written after the turn, so earlier records need not be read.
    start = {p: 2**62 if o is None else o for p, o in offsets_at(settings, topics.RESULTS, turn.at).items()}
    for _, record in _records(settings, codec, topics.RESULTS, lambda key: key == task_id, start):
        if isinstance(record, Result):
            result = record
            break
    return user_feedback_of(
        body.model_copy(update={"task_id": task_id}), task_id, author, result, feedback_id="", now_ms=now_ms()
    )


def write_label(settings: Settings, feedback: Feedback) -> None:
    """Writes the Feedback of a label. Raises DeliveryFailed, Forbidden."""
    publisher = Publisher(settings, "tentalis/cli", make_codec(settings))
    publisher.send(topics.FEEDBACK, feedback)
    publisher.flush()
