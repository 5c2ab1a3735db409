"""The sessions of one partition, as a pure fold over its log: no Faust, no Kafka, no wall clock.

`advance` takes a record's append time and ends the sessions that were idle for too long; `apply` then takes the record.
Their return values and the state they leave depend only on the log up to that record. `take_changes` returns the state
changes to write to the changelog since its last call. The rules are in docs/concepts/sessions.md.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.records import (
    EPISODE_TURN,
    Feedback,
    Forget,
    Message,
    Record,
    Result,
    SessionEvent,
    SessionEventKind,
    Task,
)
from schemas.wire.codec import DecodeError
from streams.apps.sessions.state import SESSION, TURN, Pending, SessionState, decode_session, encode_session
from streams.apps.sessions.turns import came_late, next_state_of, said_to, shown_by, signals_of
from streams.fold.changelog_buffer import ChangelogBuffer
from streams.fold.clock import DAY_MS, HOUR_MS, PartitionClock
from streams.fold.forgotten import FORGET, FORGET_TTL_MS
from streams.fold.partition import InvalidRecord, PartitionKernel
from streams.fold.recent_events import SEEN, RecentEvents
from streams.fold.session_turns import MAIN, SIDE, head_of, not_trainable, result_of, session_key
from streams.runtime.processor import OFFSET_BYTES, Change, DamagedState, StateTable, payload_of, stamped
from tentalis import signals


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Parameters of the fold: with other values the same log gives other outputs.

    `signals`: the implicit signals to detect. Times are log time (ms). `idle_ms`: how long a turn waits for its next
    state. `remember_ms`: how long the ids of events, and sessions that have ended, are remembered; longer than
    `idle_ms`. `forget_ttl_ms`: how long requests to forget are remembered. `most_bytes`: the largest event of a turn
    that gets a task; the turn's feedback, which also has the next state, must fit into a record.
    """

    signals: frozenset[str] = signals.NAMES
    idle_ms: int = 23 * HOUR_MS
    remember_ms: int = DAY_MS
    forget_ttl_ms: int = FORGET_TTL_MS
    most_bytes: int = 14 * 2**20

    def __post_init__(self) -> None:
        if not 0 < self.idle_ms < self.remember_ms:
            raise ValueError(
                f"an idle session ends after {self.idle_ms} ms: that must be above 0 and below the "
                f"{self.remember_ms} ms for which an ended session is remembered"
            )


@dataclass(slots=True)
class SessionCounts:
    """Counts of inputs and outputs, over all partitions of a process."""

    turns: Counter[str] = field(default_factory=Counter)
    not_trainable: Counter[str] = field(default_factory=Counter)
    next_states: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    late: int = 0
    forgotten: int = 0


class SessionsPartition:
    """The state of one partition and the fold over its log.

    Args:
        decode: turns the bytes at an offset into an event.
    """

    def __init__(
        self,
        number: int,
        decode: Callable[[int, bytes], Record],
        limits: SessionLimits,
        tally: SessionCounts | None = None,
    ) -> None:
        self.tally = tally or SessionCounts()
        self._number, self._decode, self._limits = number, decode, limits
        self._clock = PartitionClock()
        self._changes = ChangelogBuffer(number, self._clock, header=SESSION, payload=TURN)
        self._kernel = PartitionKernel(number, self._clock, self._changes, limits.forget_ttl_ms)
        self._sessions: dict[str, SessionState] = {}
        self.open_sessions = 0
        self.open_bytes = 0
        """Size on the log, in bytes, of the turns that wait for their next state."""
        self._seen = RecentEvents(limits.remember_ms)
        self._table: StateTable | None = None
        self._warm: list[Pending] = []

    @property
    def applied(self) -> int:
        """Offset of the last record folded."""
        return self._clock.applied

    @property
    def time(self) -> int:
        """Stream time: the running maximum of append times, in ms."""
        return self._clock.time

    @property
    def remembered(self) -> int:
        """Number of sessions that are remembered but not open."""
        return len(self._sessions) - self.open_sessions

    # --- recovery ---------------------------------------------------------------------------------------------------

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Restores a partition from its changelog. Call it on a new object only.

        The last flush may have been written in part: headers and marks can be ahead of the clock, never behind it, and
        a turn can exist without its header. Any other entry that looks open but cannot be is a stale copy and is
        deleted.

        Raises:
            DamagedState: the entries cannot come from this code.
        """
        self._clock.restore(entries, self._number)
        self._table = entries if isinstance(entries, StateTable) else None
        turns = self._changes.restore(
            _all_but_turns(entries) if isinstance(entries, StateTable) else entries.items(),
            {
                SESSION: self._restore_session,
                SEEN: self._seen.restore,
                FORGET: lambda _, value: self._kernel.forgotten.restore(value),
            },
            "sessions",
        )
        for key in (*self._seen.expire(self.time), *self._kernel.forgotten.expire(self.time)):
            self._changes.doom(key)
        for key, session in self._sessions.items():
            if session.pending is not None:
                self._restore_turn(key, session.pending, turns)
        self._changes.orphans(turns)

    def _restore_session(self, key: str, value: bytes) -> None:
        session = decode_session(value)
        # Everything due before the clock's time had fired before the clock was written.
        session.timer = self._due(session)
        if session.timer < self.time:
            self._changes.doom(SESSION + key)
            return
        self._sessions[key] = session
        self.open_sessions += session.open
        self._kernel.timers.set(key, session.timer)

    def _restore_turn(self, key: str, pending: Pending, turns: dict[int, bytes]) -> None:
        value = turns.pop(pending.offset, None)
        if value is None:
            raise self._changes.missing(pending.offset, f"session {key} holds a turn", "sessions")
        if self._table is None:
            pending.value = value
        else:
            value = self._table[self._changes.payload_key(pending.offset)]
        pending.size = len(value) - OFFSET_BYTES
        self.open_bytes += pending.size

    # --- the fold ---------------------------------------------------------------------------------------------------

    def advance(self, offset: int, timestamp: int) -> list[Record]:
        """Moves time to a record (offset, append time in ms), readable or not, and ends the sessions that are overdue.
        The offset must be greater than `applied`."""
        self._kernel.advance(offset, timestamp)
        self._changes.folding(offset)
        for key in self._seen.expire(self.time):
            self._changes.delete(key)
        self._kernel.drop_expired_requests()
        made: list[Record] = []
        for key in self._kernel.overdue(self._due_of):
            session = self._sessions[key]
            if session.open:
                made += self._end(key, session, "idle")
            else:
                del self._sessions[key]
                self._changes.header_expired(key)
        return made

    def apply(self, record: Record, raw: bytes) -> list[Record]:
        """Folds the record for which `advance` was called; `raw` is its bytes. Returns the records made from it, in
        order.

        Raises:
            InvalidRecord: this version does not support the record; the state is unchanged.
        """
        match record:
            case SessionEvent():
                return self._event(record, raw)
            case Forget():
                self._forget(record)
        return []

    def take_changes(self) -> list[list[Change]]:
        """Returns the state changes since the last call, in waves; empty if no record was folded."""
        waves = self._changes.take(self._header)
        if not waves:
            return []
        if self._table is not None:
            # By the next call the values can be read from the table.
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
            raise InvalidRecord(f"event {event.session_event_id} has a kind that this version does not support")
        if event.turn_type == EPISODE_TURN:
            self.tally.turns[EPISODE_TURN] += 1
            return []  # its worker makes the result
        if event.turn_type not in (MAIN, SIDE):
            raise InvalidRecord(
                f"event {event.session_event_id} has the turn type {event.turn_type!r}, not main or side"
            )
        if self._seen.before(event, self.applied):
            self.tally.duplicates += 1
            return []
        # Even if the header shows that the event was applied: its mark may not have reached the changelog.
        self._changes.write(*self._seen.add(event, self.applied, self.time))
        if self._kernel.forgets(head_of(event.session_id, event.user_id, event.policy), self.time):
            self.tally.forgotten += 1
            return []
        key = session_key(event)
        session = self._sessions.get(key)
        if session is not None and self._kernel.redelivered(key, session.applied):
            return []
        if event.kind is SessionEventKind.END:
            return [] if session is None or not session.open else self._end(key, session, "call")
        if session is None:
            session = self._sessions[key] = SessionState(self.applied, self.time)
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

    def _last_turn(self, session: SessionState, event: SessionEvent, raw: bytes, index: int) -> list[Record]:
        """Folds the newest main turn of its session."""
        if not session.open:
            session.open = True
            self.open_sessions += 1
        session.session_id, session.user_id, session.policy = event.session_id, event.user_id, event.policy
        session.since = self.time
        made = self._task(event, raw, index)
        if made:
            session.pending = Pending(self.applied, self.time, index, stamped(self.applied, raw), len(raw))
            self._warm.append(session.pending)
            self._changes.keep_payload(self.applied, raw)
            self.open_bytes += len(raw)
        return list(made or ())

    def _late_turn(self, event: SessionEvent, raw: bytes, index: int, later: SessionEvent) -> list[Record]:
        """Folds a turn that was appended after a later turn of its conversation. The later turn has its next state."""
        self.tally.late += 1
        made = self._task(event, raw, index)
        if not made:
            return []
        said = said_to(event, later)
        next_state = next_state_of(made[1], said, self.time)
        self._count(next_state)
        return [*made, next_state]

    def _task(self, event: SessionEvent, raw: bytes, index: int) -> tuple[Task, Result] | None:
        reason = not_trainable(event, len(raw), self._limits.most_bytes)
        if reason is not None:
            self.tally.not_trainable[reason] += 1
            return None
        result = result_of(event, index, self.time)
        return result.task, result

    def _forget(self, record: Forget) -> None:
        """Drops the open sessions of a session id or user, and blocks the events that follow."""
        if not record.asks:
            return
        self._kernel.remember(record)
        for key, session in self._sessions.items():
            if not session.open or self._kernel.redelivered(key, session.applied):
                continue
            head = head_of(session.session_id or "", session.user_id, session.policy)
            if record.concerns(head, session.since):
                self._drop(session)
                self._close(key, session)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _due_of(self, key: str) -> int | None:
        session = self._sessions.get(key)
        return None if session is None else self._due(session)

    def _due(self, session: SessionState) -> int:
        """Returns the stream time after which a session ends or is forgotten."""
        return session.since + (self._limits.idle_ms if session.open else self._limits.remember_ms)

    def _touch(self, key: str, session: SessionState) -> None:
        """Marks the session as changed by the current record."""
        session.applied = self.applied
        if not session.open:
            session.since = self.time
        self._changes.header_changed(key)
        due = self._due(session)
        if due != session.timer:
            session.timer = due
            self._kernel.timers.set(key, due)

    def _end(self, key: str, session: SessionState, by: str) -> list[Record]:
        """Ends a session: its pending turn gets feedback that nothing follows; a marker stays."""
        made: list[Record] = []
        if session.pending is not None:
            turn = self._event_of(session.pending)
            made += self._answer(session, turn, (), [signals.SessionEnd(closed=by != "idle")], by)
        self.tally.ended[by] += 1
        self._close(key, session)
        return made

    def _close(self, key: str, session: SessionState) -> None:
        session.open, session.session_id, session.user_id, session.policy = False, None, None, ""
        self.open_sessions -= 1
        self._touch(key, session)

    def _answer(
        self,
        session: SessionState,
        turn: SessionEvent,
        said: Sequence[Message],
        shown: Sequence[signals.NextEvent],
        event_id: str,
    ) -> list[Record]:
        """Returns the one next state of the pending turn, and the signals detected. The turn stops waiting."""
        pending = session.pending
        assert pending is not None
        self._drop(session)
        result = result_of(turn, pending.index, pending.at)
        next_state = next_state_of(result, said, self.time)
        self._count(next_state)
        seen = signals_of(turn, result, shown, event_id, self.time, self._limits.signals)
        self.tally.signals.update(feedback.author for feedback in seen)
        return [next_state, *seen]

    def _count(self, next_state: Feedback) -> None:
        role = next_state.author or "none"
        self.tally.next_states[role if role in ("none", "user", "tool") else "other"] += 1

    def _drop(self, session: SessionState) -> None:
        if session.pending is not None:
            self._changes.drop_payload(session.pending.offset)
            self.open_bytes -= session.pending.size
            session.pending = None

    def _event_of(self, pending: Pending) -> SessionEvent:
        value = pending.value
        try:
            if not value:
                assert self._table is not None
                value = self._table[self._changes.payload_key(pending.offset)]
            event = self._decode(pending.offset, payload_of(value))
        except (KeyError, DecodeError) as error:
            raise DamagedState(
                f"a session holds the turn at offset {pending.offset}, which is missing from the state or unreadable: "
                f"{error}"
            ) from error
        if not isinstance(event, SessionEvent):
            raise DamagedState(f"the record at offset {pending.offset} is a {type(event).__name__}, not a turn")
        return event


def _all_but_turns(table: StateTable) -> Iterator[tuple[str, bytes]]:
    """Yields the entries for recovery; for turns, the keys without values."""
    for prefix in (SESSION, SEEN, FORGET):
        yield from table.scan(prefix)
    for key in table.names(TURN):
        yield key, b""
