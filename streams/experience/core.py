"""Which sessions have ended, and where their turns lie on the log: a pure fold over one partition of session events.

Of a turn only its place, time and number are kept: the turn itself is read again when its session has ended. Of a
session that has ended its count is, for as long as the sessions keep theirs: one that goes on has the numbers of its
tasks. A session that a batch ended before a crash ends once more when the batch comes again; what is made of it has the
same ids.
"""

import heapq
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.records import Forget, Record, SessionEvent, SessionEventKind, TaskHead
from streams.join.forgotten import FORGET, Forgotten
from streams.processor import Change, StateError, applied_offset, payload_of, stamped
from streams.sessions.core import MAIN, SIDE, head_of
from streams.sessions.state import SEEN, SESSION, Seen, session_key
from streams.sessions.turns import not_trainable

MOST_TURNS = 128
"""Of a session with more main turns the newest: the lesson comes from what was said last, and state is bounded."""
MOST_BYTES = 14 * 2**20
"""Of an event that is a turn to learn from, as for the sessions themselves."""


class Turn(NamedTuple):
    """Where the event of a main turn lies, its stream time (ms), and its number in the session."""

    offset: int
    at: int
    number: int


@dataclass(slots=True)
class Session:
    """What is known of a session: the offset of what came last, the stream time (ms) of its last main turn while it is
    open, else of its end or of what came last, and how many main turns it had. Whose it is, and the newest turns that
    can be learnt from, are known while it is open."""

    applied: int
    since: int
    count: int = 0
    open: bool = False
    session_id: str = ""
    user_id: str | None = None
    policy: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def head(self) -> TaskHead:
        """What a request to forget is held against."""
        return head_of(self.session_id, self.user_id, self.policy)


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that is over, at a stream time (ms), with at least one turn, the last at `since`."""

    head: TaskHead
    since: int
    at: int
    turns: tuple[Turn, ...]


class Partition:
    """The sessions of one partition.

    Args:
        idle_ms: log time after its last main turn at which a session is over.
        remember_ms: log time for which the ids of events, and the counts of sessions that have ended, are remembered.
        forget_ttl_ms: log time for which a request to forget is remembered.
    """

    def __init__(
        self, number: int, entries: Mapping[str, bytes], *, idle_ms: int, remember_ms: int, forget_ttl_ms: int
    ) -> None:
        """Raises StateError for entries that cannot come from here."""
        self._idle_ms, self._remember_ms = idle_ms, remember_ms
        self._forgotten, self._seen = Forgotten(number, forget_ttl_ms), Seen(remember_ms)
        self._sessions: dict[str, Session] = {}
        # A heap of (due, key). An entry whose time is not the session's is stale and passed over.
        self._timers: list[tuple[int, str]] = []
        self._notes: dict[str, bytes | None] = {}
        self._changed: set[str] = set()
        self.time = 0
        self.left_out: Counter[str] = Counter()
        """Turns that are not scored anew, by why."""
        self._forgotten.restore(value for key, value in entries.items() if key.startswith(FORGET))
        for key, value in entries.items():
            if key.startswith(SEEN):
                self._seen.restore(key, value)
            elif not key.startswith(FORGET):
                self._sessions[key] = session = _decoded(key, value)
                self._timers.append((self._due(session), key))
                self.time = max(self.time, session.since)
        heapq.heapify(self._timers)

    def __len__(self) -> int:
        """How many are open."""
        return sum(session.open for session in self._sessions.values())

    def advance(self, timestamp: int) -> list[Ended]:
        """Time goes on to a record, readable or not: the sessions that were idle for too long."""
        self.time = max(self.time, timestamp)
        self._notes.update(dict.fromkeys((*self._forgotten.expire(self.time), *self._seen.expire(self.time))))
        ended: list[Ended] = []
        while self._timers and self._timers[0][0] < self.time:
            due, key = heapq.heappop(self._timers)
            session = self._sessions.get(key)
            if session is None or self._due(session) != due:
                continue
            if session.open:
                ended += self._end(key, session, session.applied)
            else:
                del self._sessions[key]
                self._changed.add(key)
        return ended

    def apply(self, record: Record, offset: int, size: int) -> list[Ended]:
        """The record that `advance` was called for, its offset and bytes: the session that it ends."""
        if isinstance(record, Forget):
            self._forget(record, offset)
        if not isinstance(record, SessionEvent) or not _understood(record) or self._seen.before(record, offset):
            return []
        mark, value = self._seen.add(record, offset, self.time)
        self._notes[mark] = value
        is_end = record.kind is SessionEventKind.END
        is_main = not is_end and record.turn_type == MAIN
        if self._forgotten.concerns(head_of(record.session_id, record.user_id, record.policy), self.time, offset):
            if is_main:
                self.left_out["forgotten"] += 1
            return []
        key = SESSION + session_key(record)
        session = self._sessions.get(key)
        if session is not None and offset <= session.applied:
            return []  # it came from the changelog with this record applied
        if is_main:
            session = session or Session(-1, 0)
            self._turn(key, session, record, offset, size)
        elif session is not None and not session.open and not is_end:
            session.applied, session.since = offset, self.time
            self._touch(key, session)
        return self._end(key, session, offset) if session is not None and (is_end or record.done) else []

    def forgotten(self, ended: Ended) -> bool:
        """Whether a request that has been read, also after its end, is about this session."""
        return self._forgotten.concerns(ended.head, ended.since, sys.maxsize)

    def take_changes(self) -> list[list[Change]]:
        """What is to be written to the changelog since the last call."""
        wave: list[Change] = list(self._notes.items())
        self._notes.clear()
        for key in sorted(self._changed):
            session = self._sessions.get(key)
            wave.append((key, None if session is None else _encoded(session)))
        self._changed.clear()
        return [wave] if wave else []

    def _turn(self, key: str, session: Session, event: SessionEvent, offset: int, size: int) -> None:
        self._sessions[key] = session
        session.applied, session.since, session.open = offset, self.time, True
        session.session_id, session.user_id, session.policy = event.session_id, event.user_id, event.policy
        index, session.count = session.count, session.count + 1
        self._touch(key, session)
        reason = not_trainable(event, size, MOST_BYTES)
        if reason is not None:
            self.left_out["not_trainable"] += 1
            return
        session.turns.append(Turn(offset, self.time, index))
        if len(session.turns) > MOST_TURNS:
            del session.turns[0]
            self.left_out["too_many"] += 1

    def _end(self, key: str, session: Session, offset: int) -> list[Ended]:
        if not session.open:
            return []
        ended = Ended(session.head, session.since, self.time, tuple(session.turns))
        self._close(key, session, offset)
        return [ended] if ended.turns else []

    def _close(self, key: str, session: Session, offset: int) -> None:
        """Its count stays, and nothing of a person."""
        self._sessions[key] = closed = Session(offset, self.time, session.count)
        self._touch(key, closed)

    def _touch(self, key: str, session: Session) -> None:
        self._changed.add(key)
        heapq.heappush(self._timers, (self._due(session), key))

    def _due(self, session: Session) -> int:
        """The stream time after which a session ends, or is forgotten."""
        return session.since + (self._idle_ms if session.open else self._remember_ms)

    def _forget(self, request: Forget, offset: int) -> None:
        """Drops what is open of a session or user, and takes nothing of theirs in again."""
        if not request.asks:
            return
        key, value = self._forgotten.remember(offset, self.time, request)
        self._notes[key] = value
        for key, session in list(self._sessions.items()):
            if session.open and session.applied < offset and request.concerns(session.head, session.since):
                self._close(key, session, offset)


def _understood(event: SessionEvent) -> bool:
    """Whether the sessions take it in; else it is their dead letter."""
    return event.kind is not SessionEventKind.UNKNOWN and event.turn_type in (MAIN, SIDE)


def _encoded(session: Session) -> bytes:
    fields: list[object] = [session.since, session.count]
    if session.open:
        fields += [session.session_id, session.user_id, session.policy, session.turns]
    return stamped(session.applied, json.dumps(fields, separators=(",", ":")).encode())


def _decoded(key: str, value: bytes) -> Session:
    if not key.startswith(SESSION):
        raise StateError(f"unknown state key {key!r}")
    try:
        since, count, *whose = json.loads(payload_of(value))
        found = Session(applied_offset(value), since, count, open=bool(whose))
        if whose:
            found.session_id, found.user_id, found.policy, turns = whose
            found.turns = [Turn(*turn) for turn in turns]
    except (ValueError, TypeError) as error:
        raise StateError(f"not a session: {key}: {value[:64].hex()}") from error
    return found
