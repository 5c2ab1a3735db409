"""Which sessions have ended, and where their turns lie on the log: a pure fold over one partition of session events.

Of a turn only its place, time and number are kept: the turn itself is read again when its session has ended. A session
that a batch ended before a crash ends once more when the batch comes again; what is made of it has the same ids.
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
from streams.join.state import StateError, short
from streams.processor import Change, applied_offset, payload_of, stamped
from streams.sessions.core import MAIN, head_of
from streams.sessions.state import session_key
from streams.sessions.turns import not_trainable

SESSION = "session/"
MOST_TURNS = 128
"""Of a session with more main turns the newest: the lesson comes from what was said last, and state is bounded."""
MOST_BYTES = 14 * 2**20
"""Of an event that is a turn to learn from, as for the sessions themselves."""


class Turn(NamedTuple):
    """Where the event of a main turn lies, its stream time (ms), its number in the session, and a mark of its id."""

    offset: int
    at: int
    number: int
    mark: str


@dataclass(slots=True)
class Session:
    """An open session: the offset and stream time (ms) of what came last, how many main turns it had, whose it is, and
    the newest turns that can be learnt from."""

    applied: int
    since: int
    count: int
    session_id: str
    user_id: str | None
    policy: str
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
    """The open sessions of one partition.

    Args:
        idle_ms: log time after its last main turn at which a session is over.
        forget_ttl_ms: log time for which a request to forget is remembered.
    """

    def __init__(self, number: int, entries: Mapping[str, bytes], *, idle_ms: int, forget_ttl_ms: int) -> None:
        """Raises StateError for entries that cannot come from here."""
        self._idle_ms = idle_ms
        self._forgotten = Forgotten(number, forget_ttl_ms)
        self._requests: dict[str, bytes | None] = {}
        self._sessions: dict[str, Session] = {}
        self._timers: list[tuple[int, str]] = []
        self._changed: set[str] = set()
        self.time = 0
        self.left_out: Counter[str] = Counter()
        """Turns that are not scored anew, by why."""
        self._forgotten.restore(value for key, value in entries.items() if key.startswith(FORGET))
        for key, value in entries.items():
            if key.startswith(FORGET):
                continue
            self._sessions[key] = session = _decoded(key, value)
            self._timers.append((session.since, key))
            self.time = max(self.time, session.since)
        heapq.heapify(self._timers)

    def __len__(self) -> int:
        return len(self._sessions)

    def advance(self, timestamp: int) -> list[Ended]:
        """Time goes on to a record, readable or not: the sessions that were idle for too long."""
        self.time = max(self.time, timestamp)
        self._requests.update(dict.fromkeys(self._forgotten.expire(self.time)))
        ended: list[Ended] = []
        while self._timers and self._timers[0][0] + self._idle_ms < self.time:
            since, key = heapq.heappop(self._timers)
            session = self._sessions.get(key)
            if session is not None and session.since == since:
                ended += self._end(key, session.applied)
        return ended

    def apply(self, record: Record, offset: int, size: int) -> list[Ended]:
        """The record that `advance` was called for, its offset and bytes: the session that it ends."""
        if isinstance(record, Forget):
            self._forget(record, offset)
        if not isinstance(record, SessionEvent):
            return []
        key = SESSION + session_key(record)
        if record.kind is SessionEventKind.END:
            return self._end(key, offset)
        if record.kind is not SessionEventKind.TURN:
            return []
        if record.turn_type == MAIN:
            self._turn(key, record, offset, size)
        return self._end(key, offset) if record.done else []

    def forgotten(self, ended: Ended) -> bool:
        """Whether a request that has been read, also after its end, is about this session."""
        return self._forgotten.concerns(ended.head, ended.since, sys.maxsize)

    def take_changes(self) -> list[list[Change]]:
        """What is to be written to the changelog since the last call."""
        wave: list[Change] = list(self._requests.items())
        self._requests.clear()
        for key in sorted(self._changed):
            session = self._sessions.get(key)
            wave.append((key, None if session is None else _encoded(session)))
        self._changed.clear()
        return [wave] if wave else []

    def _turn(self, key: str, event: SessionEvent, offset: int, size: int) -> None:
        session, mark = self._sessions.get(key), short(event.session_event_id).hex()
        if self._forgotten.concerns(head_of(event.session_id, event.user_id, event.policy), self.time, offset):
            self.left_out["forgotten"] += 1
            return
        if session is None:
            session = self._sessions[key] = Session(-1, 0, 0, event.session_id, event.user_id, event.policy)
        if offset <= session.applied or any(turn.mark == mark for turn in session.turns):
            return
        session.applied, session.since, session.policy = offset, self.time, event.policy
        index, session.count = session.count, session.count + 1
        heapq.heappush(self._timers, (session.since, key))
        self._changed.add(key)
        reason = not_trainable(event, size, MOST_BYTES)
        if reason is not None:
            self.left_out["not_trainable"] += 1
            return
        session.turns.append(Turn(offset, self.time, index, mark))
        if len(session.turns) > MOST_TURNS:
            del session.turns[0]
            self.left_out["too_many"] += 1

    def _end(self, key: str, offset: int) -> list[Ended]:
        session = self._sessions.get(key)
        if session is None or offset < session.applied:
            return []  # or it ended an earlier one of that id, and is delivered again
        del self._sessions[key]
        self._changed.add(key)
        return [Ended(session.head, session.since, self.time, tuple(session.turns))] if session.turns else []

    def _forget(self, request: Forget, offset: int) -> None:
        """Drops what is open of a session or user, and takes nothing of theirs in again."""
        if not request.asks:
            return
        key, value = self._forgotten.remember(offset, self.time, request)
        self._requests[key] = value
        for key, session in list(self._sessions.items()):
            if request.concerns(session.head, session.since):
                del self._sessions[key]
                self._changed.add(key)


def _encoded(session: Session) -> bytes:
    fields = [session.since, session.count, session.session_id, session.user_id, session.policy, session.turns]
    return stamped(session.applied, json.dumps(fields, separators=(",", ":")).encode())


def _decoded(key: str, value: bytes) -> Session:
    try:
        since, count, session_id, user_id, policy, turns = json.loads(payload_of(value))
        found = Session(applied_offset(value), since, count, session_id, user_id, policy, [Turn(*t) for t in turns])
    except (ValueError, TypeError) as error:
        raise StateError(f"not an open session: {key}: {value[:64].hex()}") from error
    if not key.startswith(SESSION):
        raise StateError(f"unknown state key {key!r}")
    return found
