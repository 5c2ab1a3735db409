"""Ended sessions and the log offsets of their turns, as a pure fold over one partition of session events.

Of each turn only the offset, time and number are kept; the turn is read again when its session has ended. The number of
turns of an ended session is kept as long as in the application `sessions`: if the session continues, its turns get the
same numbers in both. If a batch is repeated after a crash, a session that ended in it ends again, and the records made
from it have the same ids.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.ids import derived_id
from schemas.records import (
    Forget,
    Hint,
    HintKind,
    Record,
    Result,
    SessionEvent,
    SessionEventKind,
    Source,
    TaskHead,
    sample_of,
)
from streams.fold.clock import PartitionClock
from streams.fold.forgotten import FORGET
from streams.fold.partition import PartitionKernel
from streams.fold.recent_events import SEEN, RecentEvents
from streams.fold.session_turns import MAIN, SIDE, head_of, not_trainable, session_key
from streams.runtime.processor import Change, DamagedState, applied_offset, payload_of, stamped
from tentalis.opd import TeacherScores

SESSION = "session/"
MOST_TURNS = 128
"""The number of newest turns kept of a session. It bounds the state; the lesson is extracted from the last messages."""
MOST_BYTES = 14 * 2**20
"""The most bytes of a turn's event, the same limit as in the application `sessions`. Larger turns are skipped."""


class TurnRef(NamedTuple):
    """The event of a main turn: its offset, its stream time (ms), and its number in the session."""

    offset: int
    at: int
    number: int


@dataclass(slots=True)
class ExperienceSession:
    """The state of a session: the offset of its last record; the stream time (ms) of the last main turn while it is
    open, else of its end or its last record; and its number of main turns. Session, user, policy and the newest
    trainable turns are known only while it is open."""

    applied: int
    since: int
    count: int = 0
    open: bool = False
    session_id: str = ""
    user_id: str | None = None
    policy: str = ""
    turns: list[TurnRef] = field(default_factory=list)

    @property
    def head(self) -> TaskHead:
        """The task head to match against requests to forget."""
        return head_of(self.session_id, self.user_id, self.policy)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that ended at the stream time `at` (ms), with at least one turn, the last one at `since`."""

    head: TaskHead
    since: int
    at: int
    turns: tuple[TurnRef, ...]


class _Changes:
    """The state changes of a batch. They are one wave, so this state needs no order among them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes | None] = {}
        self._sessions: set[str] = set()

    def write(self, key: str, value: bytes) -> None:
        """Adds a value."""
        self._values[key] = value

    def delete(self, key: str) -> None:
        """Removes a value."""
        self._values[key] = None

    def session_changed(self, key: str) -> None:
        """Marks a session as changed or removed."""
        self._sessions.add(key)

    def take(self, sessions: Mapping[str, "ExperienceSession"]) -> list[Change]:
        """Returns the changes since the last call."""
        wave: list[Change] = list(self._values.items())
        for key in sorted(self._sessions):
            session = sessions.get(key)
            wave.append((key, None if session is None else encode_session(session)))
        self._values, self._sessions = {}, set()
        return wave


class ExperiencePartition:
    """The sessions of one partition. Its clock is not on the changelog: records may be folded again from any offset.

    Args:
        idle_ms: log time after its last main turn at which a session ends.
        remember_ms: log time for which the ids of events, and the counts of ended sessions, are remembered.
        forget_ttl_ms: log time for which a request to forget is remembered.
    """

    def __init__(
        self, number: int, entries: Mapping[str, bytes], *, idle_ms: int, remember_ms: int, forget_ttl_ms: int
    ) -> None:
        """Raises DamagedState for entries that this code did not write."""
        self._idle_ms, self._remember_ms = idle_ms, remember_ms
        self._clock, self._changes = PartitionClock(time=0), _Changes()
        self._kernel = PartitionKernel(number, self._clock, self._changes, forget_ttl_ms)
        self._seen = RecentEvents(remember_ms)
        self._sessions: dict[str, ExperienceSession] = {}
        self.left_out: Counter[str] = Counter()
        """Turns that are not scored again, by reason."""
        for key, value in entries.items():
            if key.startswith(FORGET):
                self._kernel.forgotten.restore(value)
            elif key.startswith(SEEN):
                self._seen.restore(key[len(SEEN) :], value)
            else:
                self._sessions[key] = session = decode_session(key, value)
                self._kernel.timers.set(key, self._due(session))
                self._clock.time = max(self._clock.time, session.since)

    def __len__(self) -> int:
        """Returns the number of open sessions."""
        return sum(session.open for session in self._sessions.values())

    def advance(self, offset: int, timestamp: int) -> list[EndedSession]:
        """Moves time to a record (offset, append time in ms), readable or not; returns the sessions that were idle for
        too long."""
        self._kernel.advance(offset, timestamp)
        self._kernel.drop_expired_requests()
        for key in self._seen.expire(self._clock.time):
            self._changes.delete(key)
        ended: list[EndedSession] = []
        for key in self._kernel.overdue(self._due_of):
            session = self._sessions[key]
            if session.open:
                ended += self._end(key, session, session.applied)
            else:
                del self._sessions[key]
                self._changes.session_changed(key)
        return ended

    def apply(self, record: Record, size: int) -> list[EndedSession]:
        """Folds the record for which `advance` was called; `size` is in bytes. Returns the session that it ends."""
        offset = self._clock.applied
        if isinstance(record, Forget):
            self._forget(record, offset)
        if not isinstance(record, SessionEvent) or not _understood(record) or self._seen.before(record, offset):
            return []
        self._changes.write(*self._seen.add(record, offset, self._clock.time))
        is_end = record.kind is SessionEventKind.END
        is_main = not is_end and record.turn_type == MAIN
        if self._kernel.forgets(head_of(record.session_id, record.user_id, record.policy), self._clock.time):
            if is_main:
                self.left_out["forgotten"] += 1
            return []
        key = SESSION + session_key(record)
        session = self._sessions.get(key)
        if session is not None and offset <= session.applied:
            return []  # restored with this record already applied
        if is_main:
            session = session or ExperienceSession(-1, 0)
            self._turn(key, session, record, offset, size)
        elif session is not None and not session.open and not is_end:
            session.applied, session.since = offset, self._clock.time
            self._touch(key, session)
        return self._end(key, session, offset) if session is not None and (is_end or record.done) else []

    def forgotten(self, ended: EndedSession) -> bool:
        """Returns true if any request read so far concerns this session, even one read after its end."""
        return self._kernel.forgotten.concerns(ended.head, ended.since, sys.maxsize)

    def take_changes(self) -> list[list[Change]]:
        """Returns the state changes since the last call, in waves."""
        wave = self._changes.take(self._sessions)
        return [wave] if wave else []

    def _turn(self, key: str, session: ExperienceSession, event: SessionEvent, offset: int, size: int) -> None:
        self._sessions[key] = session
        session.applied, session.since, session.open = offset, self._clock.time, True
        session.session_id, session.user_id, session.policy = event.session_id, event.user_id, event.policy
        index, session.count = session.count, session.count + 1
        self._touch(key, session)
        reason = not_trainable(event, size, MOST_BYTES)
        if reason is not None:
            self.left_out["not_trainable"] += 1
            return
        session.turns.append(TurnRef(offset, self._clock.time, index))
        if len(session.turns) > MOST_TURNS:
            del session.turns[0]
            self.left_out["too_many"] += 1

    def _end(self, key: str, session: ExperienceSession, offset: int) -> list[EndedSession]:
        if not session.open:
            return []
        ended = EndedSession(session.head, session.since, self._clock.time, tuple(session.turns))
        self._close(key, session, offset)
        return [ended] if ended.turns else []

    def _close(self, key: str, session: ExperienceSession, offset: int) -> None:
        """Keeps the count of a session and drops its personal data."""
        self._sessions[key] = closed = ExperienceSession(offset, self._clock.time, session.count)
        self._touch(key, closed)

    def _touch(self, key: str, session: ExperienceSession) -> None:
        self._changes.session_changed(key)
        self._kernel.timers.set(key, self._due(session))

    def _due_of(self, key: str) -> int | None:
        session = self._sessions.get(key)
        return None if session is None else self._due(session)

    def _due(self, session: ExperienceSession) -> int:
        """Returns the stream time after which a session ends or is forgotten."""
        return session.since + (self._idle_ms if session.open else self._remember_ms)

    def _forget(self, request: Forget, offset: int) -> None:
        """Drops the open sessions of a session id or user, and blocks the events that follow."""
        if not request.asks:
            return
        self._kernel.remember(request)
        for key, session in list(self._sessions.items()):
            if session.open and session.applied < offset and request.concerns(session.head, session.since):
                self._close(key, session, offset)


def experience_half(result: Result, ended: EndedSession, lesson: str, taught: TeacherScores, by: str) -> Hint:
    """Returns the late OPD half of a turn: one per result and lesson judge, however often the session ends."""
    return Hint(
        hint_id=derived_id("experience", result.result_id, by),
        event_time=ended.at,
        opened_at=result.opened_at,
        sample=sample_of(result),
        # No terms can name this source for the OPD half.
        source=Source.RESULT,
        kind=HintKind.ACCEPTED,
        hints=(lesson,),
        teacher_policy=taught.teacher,
        teacher_logprobs=taught.logprobs,
        hinter=by,
        topk=taught.topk,
        topk_ids=taught.topk_ids,
        topk_logprobs=taught.topk_logprobs,
    )


def _understood(event: SessionEvent) -> bool:
    """Returns true if the application `sessions` makes turns of the event. It passes those of episodes over, and
    dead-letters the others."""
    return event.kind is not SessionEventKind.UNKNOWN and event.turn_type in (MAIN, SIDE)


def encode_session(session: ExperienceSession) -> bytes:
    """Encodes a session as its state value."""
    fields: list[object] = [session.since, session.count]
    if session.open:
        fields += [session.session_id, session.user_id, session.policy, session.turns]
    return stamped(session.applied, json.dumps(fields, separators=(",", ":")).encode())


def decode_session(key: str, value: bytes) -> ExperienceSession:
    """Decodes a session from its state key and value. Raises DamagedState."""
    if not key.startswith(SESSION):
        raise DamagedState(f"unknown state key {key!r}")
    try:
        since, count, *whose = json.loads(payload_of(value))
        found = ExperienceSession(applied_offset(value), since, count, open=bool(whose))
        if whose:
            found.session_id, found.user_id, found.policy, turns = whose
            found.turns = [TurnRef(*turn) for turn in turns]
    except (ValueError, TypeError) as error:
        raise DamagedState(f"the state has an invalid session under {key}: {value[:64].hex()}") from error
    return found
