"""The sessions of one partition as a pure fold over its log: no Faust, no Kafka, no clock.

`advance` takes a record's append time and ends what was idle for too long; `apply` then takes the record. What they
return and the state that they leave depend on the log up to that record and on nothing else. `take_changes` says what
has to be written to the changelog since it was last asked. The rules are in docs/sessions.md.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.codec import DecodeError
from schemas.records import Forget, Message, Record, Result, SessionEvent, SessionEventKind, Task, TaskHead
from streams.join.forgotten import FORGET, FORGET_TTL_MS, Forgotten
from streams.join.ledger import Ledger
from streams.join.state import CLOCK, decode_clock
from streams.processor import OFFSET_BYTES, Change, StateError, Table, payload_of, stamped
from streams.sessions.state import (
    SEEN,
    SESSION,
    TURN,
    Pending,
    Seen,
    Session,
    decode_session,
    encode_session,
    session_key,
)
from streams.sessions.turns import (
    ENVIRONMENT,
    TERMS,
    came_late,
    next_state_of,
    not_trainable,
    result_of,
    said_to,
    shown_by,
    signals_of,
)
from tentalis import signals

HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS
BEGINNING = -(2**63)
MAIN, SIDE = "main", "side"


class Refused(ValueError):
    """An event that this version does not understand. Nothing was changed; it belongs on the dead-letter topic."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the fold depends on besides the log: with other values the same log gives other outputs.

    `signals`: the implicit signals that are looked for. Times are log time (ms). `idle_ms`: how long the next state of
    a turn is awaited. `remember_ms`: how long the ids of events, and sessions that have ended, are remembered; longer
    than `idle_ms`. `forget_ttl_ms`: the same of requests to forget. `most_bytes`: of the event of a turn that gets a
    task: its feedback, which has the next state besides, must fit a record."""

    signals: frozenset[str] = signals.NAMES
    idle_ms: int = 23 * HOUR_MS
    remember_ms: int = DAY_MS
    forget_ttl_ms: int = FORGET_TTL_MS
    most_bytes: int = 14 * 2**20

    def __post_init__(self) -> None:
        if not 0 < self.idle_ms < self.remember_ms:
            raise ValueError(
                f"a session ends after {self.idle_ms} ms: that must be above 0 and below the {self.remember_ms} ms for "
                "which one that has ended is remembered"
            )


@dataclass(slots=True)
class Tally:
    """What came and what became of it, counted over all partitions of a process."""

    turns: Counter[str] = field(default_factory=Counter)
    not_trainable: Counter[str] = field(default_factory=Counter)
    next_states: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    late: int = 0
    forgotten: int = 0


class Partition:
    """The state of one partition and the fold over its log.

    `applied` is the offset of the last record folded, `time` the stream time: the running maximum of append times, ms.

    Args:
        decode: makes an event of the bytes at an offset.
    """

    def __init__(
        self, number: int, decode: Callable[[int, bytes], Record], limits: Limits, tally: Tally | None = None
    ) -> None:
        self.tally = tally or Tally()
        self._number, self._decode, self._limits = number, decode, limits
        self.applied, self.time = -1, BEGINNING
        self._flushed = -1
        self._sessions: dict[str, Session] = {}
        self.open_sessions = 0
        self.open_bytes = 0
        """Bytes, as on the log, of the turns whose next state is awaited."""
        # A heap of (due, key). An entry whose time is not the session's is stale and passed over.
        self._timers: list[tuple[int, str]] = []
        self._fired: set[str] = set()  # sessions that ended at the record at hand, before it
        self._ledger = Ledger(number, SESSION, TURN)
        self._seen = Seen(limits.remember_ms)
        self._forgotten = Forgotten(number, limits.forget_ttl_ms)
        self._table: Table | None = None
        self._warm: list[Pending] = []

    @property
    def remembered(self) -> int:
        """Sessions that are remembered, but not open."""
        return len(self._sessions) - self.open_sessions

    # --- recovery ---------------------------------------------------------------------------------------------------

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Takes over what the changelog holds of a partition; to be called on a new object only.

        The waves of a flush may have got there in part: headers and marks can be ahead of the clock, never behind it,
        and a turn can be there whose header is not. Anything else that looks alive but cannot be is a stale copy, and
        is deleted.

        Raises:
            StateError: the entries cannot come from this code.
        """
        clock = entries.get(f"{CLOCK}{self._number}")
        if clock is not None:
            self.applied, self.time = decode_clock(clock)
        self._flushed = self.applied
        self._table = entries if isinstance(entries, Table) else None
        turns: dict[int, bytes] = {}
        leavers: list[bytes] = []
        for key, value in _all_but_turns(entries) if isinstance(entries, Table) else entries.items():
            if key.startswith(SESSION):
                self._restore_session(key[len(SESSION) :], value)
            elif key.startswith(SEEN):
                self._seen.restore(key, value)
            elif key.startswith(TURN):
                turns[_offset_of(key)] = value
            elif key.startswith(FORGET):
                leavers.append(value)
            elif not key.startswith(CLOCK):
                raise StateError(f"unknown state key {key!r} in partition {self._number} of the sessions")
        heapq.heapify(self._timers)
        self._forgotten.restore(leavers)
        for key in (*self._seen.expire(self.time), *self._forgotten.expire(self.time)):
            self._ledger.doom(key)
        for key, session in self._sessions.items():
            if session.pending is not None:
                self._restore_turn(key, session.pending, turns)
        for offset in turns:
            if offset > self.applied:
                # Its record comes again. Deleting it now could hit what a successor writes under the same key.
                self._ledger.unsettle(offset)
            else:
                self._ledger.doom(self._ledger.half_key(offset))

    def _restore_session(self, key: str, value: bytes) -> None:
        session = decode_session(value)
        # Whatever was due before the clock's time was done before the clock was written.
        session.timer = self._due(session)
        if session.timer < self.time:
            self._ledger.doom(SESSION + key)
            return
        self._sessions[key] = session
        self.open_sessions += session.open
        self._timers.append((session.timer, key))

    def _restore_turn(self, key: str, pending: Pending, turns: dict[int, bytes]) -> None:
        value = turns.pop(pending.offset, None)
        if value is None:
            raise StateError(
                f"session {key} waits with a turn that the changelog does not hold "
                f"(key {self._ledger.half_key(pending.offset)}): the changelog lost records. Delete it and reset the "
                "group to the beginning of the sessions topic, to fold it again"
            )
        if self._table is None:
            pending.value = value
        else:
            value = self._table[self._ledger.half_key(pending.offset)]
        pending.size = len(value) - OFFSET_BYTES
        self.open_bytes += pending.size

    # --- the fold ---------------------------------------------------------------------------------------------------

    def advance(self, offset: int, timestamp: int) -> list[Record]:
        """Time goes on to a record (offset, append time in ms), which need not be readable: ends what is overdue.

        Timeouts fire in the order of (due, session), those whose due lies *before* the stream time. The offset must be
        greater than `applied`.
        """
        self.applied = offset
        self.time = max(self.time, timestamp)
        self._ledger.folding(offset)
        self._fired.clear()
        for key in (*self._seen.expire(self.time), *self._forgotten.expire(self.time)):
            self._ledger.useless(key)
        made: list[Record] = []
        while self._timers and self._timers[0][0] < self.time:
            due, key = heapq.heappop(self._timers)
            session = self._sessions.get(key)
            if session is None or self._due(session) != due:
                continue
            if session.open:
                self._fired.add(key)
                made += self._end(key, session, "idle")
            else:
                del self._sessions[key]
                self._ledger.expired(key)
        return made

    def apply(self, record: Record, raw: bytes) -> list[Record]:
        """The record that `advance` was called for, and its bytes; what it brings about, in order.

        Raises:
            Refused: this version does not understand it; nothing was changed.
        """
        match record:
            case SessionEvent():
                return self._event(record, raw)
            case Forget():
                self._forget(record)
        return []

    def take_changes(self) -> list[list[Change]]:
        """The waves of state changes since the last call; empty if no record was folded."""
        if self.applied == self._flushed:
            return []
        self._flushed = self.applied
        waves = self._ledger.waves(self._header, self.applied, self.time)
        if self._table is not None:
            # By the next call they can be read there.
            for pending in self._warm:
                pending.value = b""
        self._warm.clear()
        return waves

    def _header(self, key: str) -> bytes | None:
        session = self._sessions.get(key)
        return None if session is None else encode_session(session)

    # --- the records ------------------------------------------------------------------------------------------------

    def _event(self, event: SessionEvent, raw: bytes) -> list[Record]:
        if event.kind is SessionEventKind.UNKNOWN:
            raise Refused(f"event {event.session_event_id} is of a kind that this version does not know")
        if event.turn_type not in (MAIN, SIDE):
            raise Refused(f"event {event.session_event_id} has the turn type {event.turn_type!r}: it is main or side")
        if self._seen.before(event, self.applied):
            self.tally.duplicates += 1
            return []
        # Also where the header shows that the event was applied: its mark may not have got to the changelog.
        self._ledger.note(*self._seen.add(event, self.applied, self.time))
        if self._forgotten.concerns(head_of(event.session_id, event.user_id, event.policy), self.time, self.applied):
            self.tally.forgotten += 1
            return []
        key = session_key(event)
        session = self._sessions.get(key)
        if session is not None and self._redelivered(key, session):
            return []
        if event.kind is SessionEventKind.END:
            return [] if session is None or not session.open else self._end(key, session, "call")
        if session is None:
            session = self._sessions[key] = Session(self.applied, self.time)
        session.requests += 1
        self.tally.turns[event.turn_type] += 1
        made: list[Record] = []
        if event.turn_type == MAIN:
            index, session.turns = session.turns, session.turns + 1
            waiting = None if session.pending is None else self._event_of(session.pending)
            if waiting is not None and came_late(waiting, event):
                self._touch(key, session)
                return self._late_turn(event, raw, index, waiting)
            if waiting is not None:
                said = said_to(waiting, event)
                made += self._answer(session, waiting, said, shown_by(said), event.session_event_id)
            made += self._last_turn(session, event, raw, index)
        self._touch(key, session)
        if event.done and session.open:
            made += self._end(key, session, "header")
        return made

    def _last_turn(self, session: Session, event: SessionEvent, raw: bytes, index: int) -> list[Record]:
        """The newest main turn of its session."""
        if not session.open:
            session.open = True
            self.open_sessions += 1
        session.session_id, session.user_id, session.policy = event.session_id, event.user_id, event.policy
        session.since = self.time
        made = self._task(event, raw, index)
        if made:
            session.pending = Pending(self.applied, self.time, index, stamped(self.applied, raw), len(raw))
            self._warm.append(session.pending)
            self._ledger.keep_half(self.applied, raw)
            self.open_bytes += len(raw)
        return list(made or ())

    def _late_turn(self, event: SessionEvent, raw: bytes, index: int, later: SessionEvent) -> list[Record]:
        """A turn that was appended after a later one of its conversation, which says what came next."""
        self.tally.late += 1
        made = self._task(event, raw, index)
        if not made:
            return []
        said = said_to(event, later)
        self._count(said)
        return [*made, next_state_of(made[1], said, self.time)]

    def _task(self, event: SessionEvent, raw: bytes, index: int) -> tuple[Task, Result] | None:
        reason = not_trainable(event, len(raw), self._limits.most_bytes)
        if reason is not None:
            self.tally.not_trainable[reason] += 1
            return None
        result = result_of(event, index, self.time)
        return result.task, result

    def _forget(self, record: Forget) -> None:
        """Drops what is open of a session or user, and takes nothing of it in again."""
        if not record.asks:
            return
        self._ledger.note(*self._forgotten.remember(self.applied, self.time, record))
        for key, session in self._sessions.items():
            if not session.open or self._redelivered(key, session):
                continue
            head = head_of(session.session_id or "", session.user_id, session.policy)
            if record.concerns(head, session.since):
                self._drop(session)
                self._close(key, session)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _due(self, session: Session) -> int:
        """The stream time after which a session ends, or is forgotten."""
        return session.since + (self._limits.idle_ms if session.open else self._limits.remember_ms)

    def _redelivered(self, key: str, session: Session) -> bool:
        """Whether the session came from the changelog with this record applied; its own end came just before it."""
        return self.applied <= session.applied and key not in self._fired

    def _touch(self, key: str, session: Session) -> None:
        """The session changes with the record at hand."""
        session.applied = self.applied
        if not session.open:
            session.since = self.time
        self._ledger.changed(key)
        due = self._due(session)
        if due != session.timer:
            session.timer = due
            heapq.heappush(self._timers, (due, key))

    def _end(self, key: str, session: Session, by: str) -> list[Record]:
        """The last turn is told that nothing follows; a marker stays."""
        made: list[Record] = []
        if session.pending is not None:
            turn = self._event_of(session.pending)
            made += self._answer(session, turn, (), [signals.Ended(closed=by != "idle")], by)
        self.tally.ended[by] += 1
        self._close(key, session)
        return made

    def _close(self, key: str, session: Session) -> None:
        session.open, session.session_id, session.user_id, session.policy = False, None, None, ""
        self.open_sessions -= 1
        self._touch(key, session)

    def _answer(
        self,
        session: Session,
        turn: SessionEvent,
        said: Sequence[Message],
        shown: Sequence[signals.Event],
        event_id: str,
    ) -> list[Record]:
        """The one next state of the pending turn, which is awaited no more, and what else was to be seen."""
        pending = session.pending
        assert pending is not None
        self._drop(session)
        self._count(said)
        result = result_of(turn, pending.index, pending.at)
        seen = signals_of(turn, result, shown, event_id, self.time, self._limits.signals)
        self.tally.signals.update(feedback.author for feedback in seen)
        return [next_state_of(result, said, self.time), *seen]

    def _count(self, said: Sequence[Message]) -> None:
        role = said[-1].role if said else "none"
        self.tally.next_states[role if role in ("none", "user", "tool") else "other"] += 1

    def _drop(self, session: Session) -> None:
        if session.pending is not None:
            self._ledger.drop_half(session.pending.offset)
            self.open_bytes -= session.pending.size
            session.pending = None

    def _event_of(self, pending: Pending) -> SessionEvent:
        value = pending.value
        try:
            if not value:
                assert self._table is not None
                value = self._table[self._ledger.half_key(pending.offset)]
            event = self._decode(pending.offset, payload_of(value))
        except (KeyError, DecodeError) as error:
            raise StateError(
                f"a session waits with the turn at offset {pending.offset}, which is not in the state, or not what was "
                f"kept: {error}"
            ) from error
        if not isinstance(event, SessionEvent):
            raise StateError(f"the turn at offset {pending.offset} is a {type(event).__name__}")
        return event


def head_of(session_id: str, user_id: str | None, policy: str) -> TaskHead:
    """What a request to forget is held against."""
    return TaskHead(
        task_id="turn",
        policy=policy or "none",
        environment=ENVIRONMENT,
        terms=TERMS,
        session_id=session_id,
        user_id=user_id,
    )


def _all_but_turns(table: Table) -> Iterator[tuple[str, bytes]]:
    """Entries for recovery, of turns the keys alone."""
    for prefix in (SESSION, SEEN, FORGET):
        yield from table.scan(prefix)
    for key in table.names(TURN):
        yield key, b""


def _offset_of(key: str) -> int:
    try:
        return int(key.rpartition("/")[2])
    except ValueError as error:
        raise StateError(f"state key {key!r} is not of the form {TURN}<partition>/<offset>") from error
