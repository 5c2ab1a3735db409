"""The join of one partition as a pure fold over the halves log: no Faust, no Kafka, no clock.

`advance` takes a record's append time and gives up what is overdue; `apply` then takes the record. What they return and
the state that they leave depend on the log up to that record and on nothing else. `take_changes` says what has to be
written to the changelog since it was last asked. The rules are in docs/join.md.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from schemas.codec import DecodeError
from schemas.records import Forget, Hint, Open, Record, Score, TaskHead
from streams.join import emit
from streams.join.emit import Emission, Halves, Place
from streams.join.forgotten import FORGET, FORGET_TTL_MS, Forgotten
from streams.join.halves import HalvesOnDisk
from streams.join.ledger import Ledger
from streams.join.markers import InMemory, Markers, OnDisk
from streams.join.state import (
    CLOCK,
    HALF,
    TASK,
    Payload,
    Phase,
    Slot,
    Task,
    decode_clock,
    decode_task,
    encode_task,
    half_key,
    half_offset,
    phase_and_since,
    short,
)
from streams.processor import OFFSET_BYTES, Change, StateError, Table, payload_of

DAY_MS = 24 * 3600 * 1000
BEGINNING = -(2**63)


class Refused(ValueError):
    """A record that contradicts what is known of its task. Nothing was changed; it belongs on the dead-letter topic."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`marker_ttl_ms`: how long (log time) a closed task is remembered; also the bound on deadlines, and the age at
    which a task is too old to be opened. `max_samples`: the largest group. `forget_ttl_ms`: how long a request to
    forget is remembered; not shorter than tasks, results and feedback are kept."""

    marker_ttl_ms: int = DAY_MS
    max_samples: int = 4096
    forget_ttl_ms: int = FORGET_TTL_MS


@dataclass(slots=True)
class Tally:
    """What the fold passes over without an emission, counted over all partitions of a process."""

    duplicates: int = 0
    hints_given_up: int = 0
    deadlines_passed: int = 0


class Partition:
    """The state of one partition and the fold over its log.

    `applied` is the offset of the last record folded, `time` the stream time: the running maximum of append times, ms.
    """

    def __init__(
        self, place: Place, decode: Callable[[int, bytes], Record], limits: Limits, tally: Tally | None = None
    ) -> None:
        """`decode` makes a record of the bytes of a half at an offset; needed for halves that recovery brought back."""
        self.tally = tally or Tally()
        self._place, self._decode, self._limits = place, decode, limits
        self.applied, self.time = -1, BEGINNING
        self._flushed = -1
        self._open: dict[str, Task] = {}
        self.open_bytes = 0
        """Bytes, as on the log, of the halves that open tasks wait with."""
        self._markers: Markers = InMemory()
        self._kept: HalvesOnDisk | None = None
        # A heap of (due, task_id). An entry whose time is not the task's is stale and passed over.
        self._timers: list[tuple[int, str]] = []
        self._fired: set[str] = set()  # tasks whose timeouts fired at the record at hand
        self._ledger = Ledger(place.partition)
        self._forgotten = Forgotten(place.partition, limits.forget_ttl_ms)

    @property
    def open_tasks(self) -> int:
        """Tasks that wait for halves."""
        return len(self._open)

    @property
    def markers(self) -> int:
        """Tasks that are remembered, but not open."""
        return len(self._markers)

    @property
    def oldest_open(self) -> int | None:
        """When the oldest open task was opened, ms of stream time."""
        return min((task.since for task in self._open.values()), default=None)

    def is_open(self, task_id: str) -> bool:
        """Whether a task waits for something."""
        return task_id in self._open

    # --- recovery ---------------------------------------------------------------------------------------------------

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Takes over what the changelog holds of a partition; to be called on a new object only.

        The waves of a flush may have got there in part: headers can be ahead of the clock, never behind it, and a half
        can be there whose header is not. Anything else that looks alive but cannot be is a stale copy, and is deleted.

        Raises:
            StateError: the entries cannot come from this code.
        """
        clock = entries.get(f"{CLOCK}{self._place.partition}")
        if clock is not None:
            self.applied, self.time = decode_clock(clock)
        self._flushed = self.applied
        if isinstance(entries, Table):
            self._markers = remembered = OnDisk(entries, self.time - self._limits.marker_ttl_ms)
            for task_id in remembered.left():
                self._ledger.doom(TASK + task_id)
            self._kept = HalvesOnDisk(entries, self._place.partition)
        halves: dict[int, bytes] = {}
        leavers: list[bytes] = []
        for key, value in _ageless(entries) if isinstance(entries, Table) else entries.items():
            if key.startswith(TASK):
                self._restore_task(key, value)
            elif key.startswith(HALF):
                halves[half_offset(key)] = value
            elif key.startswith(FORGET):
                leavers.append(value)
            elif not key.startswith(CLOCK):
                raise StateError(f"unknown state key {key!r} in partition {self._place.partition} of the join")
        heapq.heapify(self._timers)
        self._forgotten.restore(leavers)
        for key in self._forgotten.expire(self.time):
            self._ledger.doom(key)
        for task_id, task in self._open.items():
            for slot in task.slots.values():
                for payload in (slot.score, slot.hint):
                    if payload is not None:
                        value = self._found(task_id, payload.offset, halves)
                        if self._kept is None:
                            payload.value = value
                        else:
                            value = self._kept.value(payload.offset)
                        payload.size = len(value) - OFFSET_BYTES
                        self.open_bytes += payload.size
        for offset in halves:
            if offset > self.applied:
                # Its record comes again. Deleting it now could hit what a successor writes under the same key.
                self._ledger.unsettle(offset)
            else:
                self._ledger.doom(half_key(self._place.partition, offset))

    def _restore_task(self, key: str, value: bytes) -> None:
        task_id = key[len(TASK) :]
        phase, since = phase_and_since(value)
        if phase is Phase.OPEN:
            task = decode_task(value)
            # Whatever was due before the clock's time was given up before the clock was written.
            if task.due >= self.time:
                self._open[task_id] = task
                self._timers.append((task.due, task_id))
                return
        elif not self._expired(since):
            self._markers.put(task_id, since, value)
            return
        self._ledger.doom(key)

    def _found(self, task_id: str, offset: int, halves: dict[int, bytes]) -> bytes:
        value = halves.pop(offset, None)
        if value is None:
            key = half_key(self._place.partition, offset)
            raise StateError(
                f"task {task_id} waits with a half that the changelog does not hold (key {key}): the changelog lost "
                "records. Delete it and reset the group to the beginning of the halves topic, to fold it again"
            )
        return value

    # --- the fold ---------------------------------------------------------------------------------------------------

    def advance(self, offset: int, timestamp: int) -> list[Emission]:
        """Time goes on to a record (offset, append time in ms), which need not be readable: gives up what is overdue.

        Timeouts fire in the order of (due, task_id), those whose due lies *before* the stream time: a record at exactly
        the deadline is in time. The offset must be greater than `applied`.
        """
        self.applied = offset
        self.time = max(self.time, timestamp)
        self._ledger.folding(offset)
        self._fired.clear()
        if self._expired(self._markers.oldest):
            for task_id in self._markers.expire(self.time - self._limits.marker_ttl_ms):
                self._ledger.expired(task_id)
        for key in self._forgotten.expire(self.time):
            self._ledger.useless(key)
        emissions: list[Emission] = []
        while self._timers and self._timers[0][0] < self.time:
            due, task_id = heapq.heappop(self._timers)
            task = self._open.get(task_id)
            if task is not None and task.due == due:
                emissions += self._give_up(task_id, task)
        return emissions

    def apply(self, record: Record, raw: bytes) -> list[Emission]:
        """The record that `advance` was called for, and its bytes.

        Raises:
            Refused: it contradicts its task, or breaks a limit; nothing was changed.
        """
        match record:
            case Score() | Hint():
                return self._half(record, raw)
            case Open():
                return self._opened(record)
            case Forget():
                return self._forget(record)
        return []

    def take_changes(self) -> list[list[Change]]:
        """The waves of state changes since the last call; empty if no record was folded."""
        if self.applied == self._flushed:
            return []
        self._flushed = self.applied
        waves = self._ledger.waves(self._header, self.applied, self.time)
        self._markers.flushed()
        if self._kept is not None:
            self._kept.flushed()
        return waves

    def _header(self, task_id: str) -> bytes | None:
        task = self._open.get(task_id)
        return encode_task(task) if task is not None else self._markers.get(task_id)

    # --- timeouts ---------------------------------------------------------------------------------------------------

    def _expired(self, since: int) -> bool:
        return since + self._limits.marker_ttl_ms < self.time

    def _too_old(self, record: Open | Score | Hint) -> bool:
        """Whether the task of a record that would open it may have closed already, and be forgotten.

        A task closes no earlier than it was appended, so younger than that no marker has expired.
        """
        return self._expired(record.opened_at) or (record.task_at is not None and self._expired(record.task_at))

    def _wait(self, task_id: str, task: Task, due: int) -> None:
        task.due = due
        heapq.heappush(self._timers, (due, task_id))

    def _give_up(self, task_id: str, task: Task) -> list[Emission]:
        """What is due at `task.due`: the whole group at the deadline, else the slots whose wait for a hint ends."""
        self._fired.add(task_id)
        if task.due >= task.deadline:
            self.tally.deadlines_passed += 1
            return self._close(task_id, task)
        for slot in task.slots.values():
            if slot.score is not None and not slot.closed and slot.score_at + task.window <= task.due:
                self.tally.hints_given_up += 1
                slot.closed = True
                task.n_closed += 1
                self._touch(task_id, task)
        if task.n_closed == task.n_samples:
            return self._close(task_id, task)
        self._wait(task_id, task, task.next_due())
        return []

    # --- the records ------------------------------------------------------------------------------------------------

    def _opened(self, record: Open) -> list[Emission]:
        head = record.head
        task = self._find(head.task_id)
        if task is not None and (self._redelivered(head.task_id, task) or task.phase is Phase.CLOSED):
            return []
        self._check(head, task)
        if task is not None and task.phase is Phase.OPEN:
            return []
        if not self._too_old(record) and not self._leaves(head, record.opened_at):
            return self._open_task(head, record.opened_at, task)[1]
        task = task or Task(self.applied, Phase.UNOPENED, self.time)
        event = short(record.event_id)
        if event in task.seen:
            return []
        task.seen[event] = None
        self._touch(head.task_id, task)
        return emit.late_open(head, record.event_id, self.time)

    def _half(self, half: Score | Hint, raw: bytes) -> list[Emission]:
        sample = half.sample
        task_id, index = sample.head.task_id, sample.sample_index
        task = self._find(task_id)
        event = short(half.event_id)
        if task is not None and (self._redelivered(task_id, task) or event in task.seen):
            self.tally.duplicates += 1
            return []  # known, or the same half twice on the log
        self._check(sample.head, task)
        slot = task.slots.get(index) if task is not None else None
        result, digest = short(sample.result_id), short(sample.response_digest)
        if slot is not None and slot.result == result:
            self._check_slot(half, slot, digest)

        emissions: list[Emission] = []
        leaves = self._leaves(sample.head, half.opened_at)
        opens = _answers(half) and not leaves and not self._too_old(half)
        if (task is None or task.phase is Phase.UNOPENED) and opens:
            task, emissions = self._open_task(sample.head, half.opened_at, task)
        elif task is None:
            task = Task(self.applied, Phase.UNOPENED, self.time)
        if slot is None:
            slot = task.slots[index] = Slot(result, digest)
        if slot.result != result:
            return emissions + self._superseded(task_id, task, half)
        task.seen[event] = None
        self._touch(task_id, task)
        if task.phase is Phase.OPEN and not slot.closed and not leaves and _answers(half) and _lacks(slot, half):
            self._fill(task_id, task, slot, half, raw)
            return self._close(task_id, task) if task.n_closed == task.n_samples else []
        return emissions + self._late(task_id, task, slot, half, leaves)

    def _fill(self, task_id: str, task: Task, slot: Slot, half: Score | Hint, raw: bytes) -> None:
        self._ledger.keep_half(self.applied, raw)
        payload = Payload(self.applied, half, size=len(raw))
        self.open_bytes += payload.size
        if isinstance(half, Score):
            slot.score, slot.score_at = payload, self.time
        else:
            slot.hint = payload
            slot.opd_taken |= emit.usable_hint(half)
        if self._kept is not None:
            self._kept.add(payload, len(raw))
        terms = half.sample.head.terms
        if (terms.rl is None or slot.score is not None) and (terms.opd is None or slot.hint is not None):
            slot.closed = True
            task.n_closed += 1
        elif isinstance(half, Score) and self.time + task.window < task.due:
            self._wait(task_id, task, self.time + task.window)

    def _late(self, task_id: str, task: Task, slot: Slot, half: Score | Hint, leaves: bool) -> list[Emission]:
        refused = slot.opd_taken or task.forgotten or leaves
        as_rollout = isinstance(half, Hint) and emit.usable_hint(half) and not refused
        slot.opd_taken |= as_rollout
        self._touch(task_id, task)
        return [emit.late(self._place, half, self.applied, self.time, as_rollout=as_rollout)]

    def _superseded(self, task_id: str, task: Task, half: Score | Hint) -> list[Emission]:
        mark = short("superseded", half.sample.sample_index, half.sample.result_id)
        if mark in task.seen:
            return []
        task.seen[mark] = None
        self._touch(task_id, task)
        return [emit.superseded(half, self.time)]

    def _forget(self, record: Forget) -> list[Emission]:
        """Closes what is open of a session or user, without its halves, and takes nothing of it in again."""
        if not record.asks:
            return []
        self._ledger.note(*self._forgotten.remember(self.applied, self.time, record))
        emissions: list[Emission] = []
        for task_id in sorted(self._open):
            task = self._open[task_id]
            if not self._redelivered(task_id, task) and record.concerns(task.parsed_head(), task.since):
                task.forgotten = True
                for slot in task.slots.values():
                    self._drop(slot)
                emissions += self._close(task_id, task)
        return emissions

    def _leaves(self, head: TaskHead, opened_at: int) -> bool:
        """Whether somebody asked to forget what this is about."""
        return self._forgotten.concerns(head, min(opened_at, self.time), self.applied)

    def _check(self, head: TaskHead, task: Task | None) -> None:
        """Raises Refused for a head that breaks a limit or is not that of the task it names."""
        limits = self._limits
        if head.n_samples > limits.max_samples:
            raise Refused(f"task {head.task_id} asks for {head.n_samples} samples; the limit is {limits.max_samples}")
        if head.terms.deadline_ms >= limits.marker_ttl_ms:
            raise Refused(
                f"task {head.task_id} has a deadline of {head.terms.deadline_ms} ms; it must be below the "
                f"{limits.marker_ttl_ms} ms for which a closed task is remembered (--marker-ttl of the join)"
            )
        if task is None or task.phase is Phase.UNOPENED:
            return
        if head.n_samples != task.n_samples:
            raise Refused(f"task {head.task_id} has {task.n_samples} samples, but this record says {head.n_samples}")
        if task.phase is Phase.OPEN:
            known = task.parsed_head().terms
            if (head.terms.rl, head.terms.opd) != (known.rl, known.opd):
                raise Refused(
                    f"task {head.task_id} waits for rl={known.rl}, opd={known.opd}, but this record says "
                    f"rl={head.terms.rl}, opd={head.terms.opd}"
                )

    def _check_slot(self, half: Score | Hint, slot: Slot, digest: bytes) -> None:
        """Raises Refused if one result has two answers, or its halves two token sequences."""
        sample = half.sample
        where = f"result {sample.result_id} (task {half.key}, sample {sample.sample_index})"
        if slot.digest != digest:
            raise Refused(
                f"{where} has the response digest {sample.response_digest}, its halves before had another: a result id "
                "must be derived from the answer"
            )
        other = self._record(slot.hint if isinstance(half, Score) else slot.score)
        if other is None or not other.sample.token_ids or not sample.token_ids:
            return
        if other.sample.token_ids != sample.token_ids:
            raise Refused(
                f"the halves of {where} bring different tokens: {len(sample.token_ids) // 4} here, "
                f"{len(other.sample.token_ids) // 4} before"
            )

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _find(self, task_id: str) -> Task | None:
        task = self._open.get(task_id)
        if task is None and (value := self._markers.get(task_id)) is not None:
            task = decode_task(value)
        return task

    def _redelivered(self, task_id: str, task: Task) -> bool:
        """Whether the task came from the changelog with this record applied; its own timeouts came just before it."""
        return self.applied <= task.applied and task_id not in self._fired

    def _open_task(self, head: TaskHead, opened_at: int, known: Task | None) -> tuple[Task, list[Emission]]:
        """Opens a task; one whose deadline has passed already closes at once, like any whose deadline passes.

        A task cannot have opened after the record that tells of it, so `opened_at` is capped by stream time.
        """
        since = min(opened_at, self.time)
        task = Task(self.applied, Phase.OPEN, since, head.n_samples, head=head)
        if known is not None:
            task.slots, task.seen = known.slots, known.seen
            self._markers.remove(head.task_id)
        task.deadline = since + head.terms.deadline_ms
        task.window = head.terms.opd_window_ms
        self._open[head.task_id] = task
        self._touch(head.task_id, task)
        if task.deadline < self.time:
            return task, self._close(head.task_id, task)
        self._wait(head.task_id, task, task.deadline)
        return task, []

    def _close(self, task_id: str, task: Task) -> list[Emission]:
        """Emits the group, drops its halves and leaves a marker."""
        halves = {}
        for index, slot in task.slots.items():
            score, hint = self._record(slot.score), self._record(slot.hint)
            if score is not None or hint is not None:
                assert not isinstance(score, Hint) and not isinstance(hint, Score)
                places = [-1 if payload is None else payload.offset for payload in (slot.score, slot.hint)]
                halves[index] = Halves(score, places[0], hint, places[1])
            self._drop(slot)
            slot.closed, slot.score_at = True, 0
        emissions = emit.group(self._place, task.parsed_head(), halves, self.time)
        task.phase, task.since, task.head, task.head_json = Phase.CLOSED, self.time, None, b""
        del self._open[task_id]
        self._touch(task_id, task)
        return emissions

    def _touch(self, task_id: str, task: Task) -> None:
        """The task changes with the record at hand."""
        task.applied = self.applied
        self._ledger.changed(task_id)
        if task.phase is not Phase.OPEN:
            self._markers.put(task_id, task.since, encode_task(task))

    def _drop(self, slot: Slot) -> None:
        """The halves of a slot are not needed any more."""
        for payload in (slot.score, slot.hint):
            if payload is not None:
                self._ledger.drop_half(payload.offset)
                self.open_bytes -= payload.size
        slot.score = slot.hint = None

    def _record(self, payload: Payload | None) -> Score | Hint | None:
        if payload is None:
            return None
        if payload.record is None:
            value = payload.value if self._kept is None else self._kept.value(payload.offset)
            try:
                record = self._decode(payload.offset, payload_of(value))
            except DecodeError as error:
                raise StateError(
                    f"the half at offset {payload.offset} cannot be read from the state: {error}"
                ) from error
            if not isinstance(record, Score | Hint):
                raise StateError(f"the half at offset {payload.offset} is a {type(record).__name__}")
            payload.record, payload.value = record, b""
            if self._kept is not None:
                self._kept.add(payload, len(value))
        return payload.record


def _ageless(table: Table) -> Iterator[tuple[str, bytes]]:
    """Entries for recovery: all but the markers, which are too many; of halves the keys alone."""
    for key in table.ageless():
        yield key, b"" if key.startswith(HALF) else table[key]


def _answers(half: Score | Hint) -> bool:
    """Whether the half comes from the one source that its task's terms name for it."""
    terms = half.sample.head.terms
    return half.source is (terms.rl if isinstance(half, Score) else terms.opd)


def _lacks(slot: Slot, half: Score | Hint) -> bool:
    return (slot.score if isinstance(half, Score) else slot.hint) is None
