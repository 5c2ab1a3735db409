"""The join of one partition, as a pure fold over the halves log: no Faust, no Kafka, no wall clock.

`advance` takes a record's append time and fires the timeouts that are overdue; `apply` then takes the record. Their
return values and the state they leave depend only on the log up to that record. `take_changes` returns the state
changes to write to the changelog since its last call. The rules are in docs/concepts/join.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from schemas.records import Forget, Hint, Open, Record, Score, TaskHead
from schemas.wire.codec import DecodeError
from streams.apps.join import emit
from streams.apps.join.closed_tasks import ClosedTasks, ClosedTasksInMemory, ClosedTasksOnDisk
from streams.apps.join.emit import Emission, Halves, HalvesPartition
from streams.apps.join.half_cache import HalfCache
from streams.apps.join.state import (
    HALF,
    TASK,
    JoinState,
    Payload,
    Phase,
    Slot,
    answers_terms,
    decode_task,
    encode_task,
    phase_and_since,
)
from streams.fold.changelog_buffer import ChangelogBuffer
from streams.fold.clock import DAY_MS, PartitionClock
from streams.fold.forgotten import FORGET, FORGET_TTL_MS
from streams.fold.hashing import short
from streams.fold.partition import InvalidRecord, PartitionKernel
from streams.runtime.processor import OFFSET_BYTES, Change, DamagedState, StateTable, payload_of


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Limits of the fold.

    `marker_ttl_ms`: log time for which a closed task is remembered; also the bound on deadlines, and the age above
    which a task can no longer be opened. `max_samples`: the largest group. `forget_ttl_ms`: log time for which a
    request to forget is remembered; at least the retention of tasks, results and feedback.
    """

    marker_ttl_ms: int = DAY_MS
    max_samples: int = 4096
    forget_ttl_ms: int = FORGET_TTL_MS


@dataclass(slots=True)
class JoinCounts:
    """Counts of duplicates and timeouts, over all partitions of a process."""

    duplicates: int = 0
    hints_given_up: int = 0
    deadlines_passed: int = 0


class JoinPartition:
    """The state of one partition and the fold over its log."""

    def __init__(
        self,
        place: HalvesPartition,
        decode: Callable[[int, bytes], Record],
        limits: JoinLimits,
        tally: JoinCounts | None = None,
    ) -> None:
        """`decode` turns the bytes of a half at an offset into a record; needed for halves restored from the
        changelog."""
        self.tally = tally or JoinCounts()
        self._place, self._decode, self._limits = place, decode, limits
        self._clock = PartitionClock()
        self._changes = ChangelogBuffer(place.partition, self._clock, header=TASK, payload=HALF)
        self._kernel = PartitionKernel(place.partition, self._clock, self._changes, limits.forget_ttl_ms)
        self._open: dict[str, JoinState] = {}
        self.open_bytes = 0
        """Size on the log, in bytes, of the halves that open tasks hold."""
        self._markers: ClosedTasks = ClosedTasksInMemory()
        self._kept: HalfCache | None = None

    @property
    def applied(self) -> int:
        """Offset of the last record folded."""
        return self._clock.applied

    @property
    def time(self) -> int:
        """Stream time: the running maximum of append times, in ms."""
        return self._clock.time

    @property
    def earliest_due(self) -> int:
        """No wait ends before this stream time, in ms; NEVER if nothing waits."""
        return self._kernel.timers.earliest

    @property
    def open_tasks(self) -> int:
        """Number of tasks that wait for halves."""
        return len(self._open)

    @property
    def markers(self) -> int:
        """Number of tasks that are remembered but not open."""
        return len(self._markers)

    @property
    def oldest_open(self) -> int | None:
        """Opening time of the oldest open task, in ms of stream time; None if no task is open."""
        return min((task.since for task in self._open.values()), default=None)

    def is_open(self, task_id: str) -> bool:
        """Returns true if the task waits for halves."""
        return task_id in self._open

    # --- recovery ---------------------------------------------------------------------------------------------------

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Restores a partition from its changelog. Call it on a new object only.

        The last flush may have been written in part: headers can be ahead of the clock, never behind it, and a half can
        exist without its header. Any other entry that looks open but cannot be is a stale copy and is deleted.

        Raises:
            DamagedState: the entries cannot come from this code.
        """
        self._clock.restore(entries, self._place.partition)
        if isinstance(entries, StateTable):
            self._markers = remembered = ClosedTasksOnDisk(entries, self.time - self._limits.marker_ttl_ms)
            for task_id in remembered.left():
                self._changes.doom(TASK + task_id)
            self._kept = HalfCache(entries, self._changes.payload_key)
        halves = self._changes.restore(
            _ageless(entries) if isinstance(entries, StateTable) else entries.items(),
            {TASK: self._restore_task, FORGET: lambda _, value: self._kernel.forgotten.restore(value)},
            "join",
        )
        for key in self._kernel.forgotten.expire(self.time):
            self._changes.doom(key)
        for task_id, task in self._open.items():
            for slot in task.slots.values():
                for payload in (slot.score, slot.hint):
                    if payload is not None:
                        self._restore_half(task_id, payload, halves)
        self._changes.orphans(halves)

    def _restore_task(self, task_id: str, value: bytes) -> None:
        phase, since = phase_and_since(value)
        if phase is Phase.OPEN:
            task = decode_task(value)
            # Everything due before the clock's time had fired before the clock was written.
            if task.due >= self.time:
                self._open[task_id] = task
                self._kernel.timers.set(task_id, task.due)
                return
        elif not self._expired(since):
            self._markers.put(task_id, since, value)
            return
        self._changes.doom(TASK + task_id)

    def _restore_half(self, task_id: str, payload: Payload, halves: dict[int, bytes]) -> None:
        value = halves.pop(payload.offset, None)
        if value is None:
            raise self._changes.missing(payload.offset, f"task {task_id} holds a half", "halves")
        if self._kept is None:
            payload.value = value
        else:
            value = self._kept.value(payload.offset)
        payload.size = len(value) - OFFSET_BYTES
        self.open_bytes += payload.size

    # --- the fold ---------------------------------------------------------------------------------------------------

    def advance(self, offset: int, timestamp: int) -> list[Emission]:
        """Moves time to a record (offset, append time in ms), readable or not, and fires the timeouts that are overdue.
        The offset must be greater than `applied`."""
        self._kernel.advance(offset, timestamp)
        self._changes.folding(offset)
        if self._expired(self._markers.oldest):
            for task_id in self._markers.expire(self.time - self._limits.marker_ttl_ms):
                self._changes.header_expired(task_id)
        self._kernel.drop_expired_requests()
        emissions: list[Emission] = []
        for task_id in self._kernel.overdue(self._due):
            emissions += self._give_up(task_id, self._open[task_id])
        return emissions

    def apply(self, record: Record, raw: bytes) -> list[Emission]:
        """Folds the record for which `advance` was called; `raw` is its bytes.

        Raises:
            InvalidRecord: the record contradicts its task or breaks a limit; the state is unchanged.
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
        """Returns the state changes since the last call, in waves; empty if no record was folded."""
        waves = self._changes.take(self._header)
        if not waves:
            return []
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
        """Returns true if the task of a record may have been closed and forgotten, so that the record must not open it.

        A task closes no earlier than it was appended, so the marker of a younger task cannot have expired.
        """
        return self._expired(record.opened_at) or (record.task_at is not None and self._expired(record.task_at))

    def _due(self, task_id: str) -> int | None:
        task = self._open.get(task_id)
        return None if task is None else task.due

    def _wait(self, task_id: str, task: JoinState, due: int) -> None:
        task.due = due
        self._kernel.timers.set(task_id, due)

    def _give_up(self, task_id: str, task: JoinState) -> list[Emission]:
        """Fires the timeout at `task.due`: closes the group at the deadline, else the slots whose wait for a hint
        ends."""
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
        if task is not None and (self._kernel.redelivered(head.task_id, task.applied) or task.phase is Phase.CLOSED):
            return []
        self._check(head, task)
        if task is not None and task.phase is Phase.OPEN:
            return []
        if not self._too_old(record) and not self._kernel.forgets(head, record.opened_at):
            return self._open_task(head, record.opened_at, task)[1]
        task = task or JoinState(self.applied, Phase.UNOPENED, self.time)
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
        if task is not None and (self._kernel.redelivered(task_id, task.applied) or event in task.seen):
            self.tally.duplicates += 1
            return []  # already folded, or the same half twice on the log
        self._check(sample.head, task)
        slot = task.slots.get(index) if task is not None else None
        result, digest = short(sample.result_id), short(sample.response_digest)
        if slot is not None and slot.result == result:
            self._check_slot(half, slot, digest)

        emissions: list[Emission] = []
        leaves = self._kernel.forgets(sample.head, half.opened_at)
        opens = answers_terms(half) and not leaves and not self._too_old(half)
        if (task is None or task.phase is Phase.UNOPENED) and opens:
            task, emissions = self._open_task(sample.head, half.opened_at, task)
        elif task is None:
            task = JoinState(self.applied, Phase.UNOPENED, self.time)
        if slot is None:
            slot = task.slots[index] = Slot(result, digest)
        if slot.result != result:
            return emissions + self._superseded(task_id, task, half)
        task.seen[event] = None
        self._touch(task_id, task)
        if task.phase is Phase.OPEN and not slot.closed and not leaves and answers_terms(half) and _lacks(slot, half):
            self._fill(task_id, task, slot, half, raw)
            return self._close(task_id, task) if task.n_closed == task.n_samples else []
        return emissions + self._late(task_id, task, slot, half, leaves)

    def _fill(self, task_id: str, task: JoinState, slot: Slot, half: Score | Hint, raw: bytes) -> None:
        self._changes.keep_payload(self.applied, raw)
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

    def _late(self, task_id: str, task: JoinState, slot: Slot, half: Score | Hint, leaves: bool) -> list[Emission]:
        if task.forgotten or leaves:
            as_rollout = False
        elif isinstance(half, Hint):
            as_rollout = emit.usable_hint(half) and not slot.opd_taken
            slot.opd_taken |= as_rollout
        else:
            # A grade before the score is a part of the score.
            scored = task.phase is Phase.CLOSED or slot.score is not None
            as_rollout = scored and emit.usable_grade(half)
        self._touch(task_id, task)
        return [emit.late(self._place, half, self.applied, self.time, as_rollout=as_rollout)]

    def _superseded(self, task_id: str, task: JoinState, half: Score | Hint) -> list[Emission]:
        mark = short("superseded", half.sample.sample_index, half.sample.result_id)
        if mark in task.seen:
            return []
        task.seen[mark] = None
        self._touch(task_id, task)
        return [emit.superseded(half, self.time)]

    def _forget(self, record: Forget) -> list[Emission]:
        """Closes the open tasks of a session or user without their halves, and blocks the halves that follow."""
        if not record.asks:
            return []
        self._kernel.remember(record)
        emissions: list[Emission] = []
        for task_id in sorted(self._open):
            task = self._open[task_id]
            if not self._kernel.redelivered(task_id, task.applied) and record.concerns(task.parsed_head(), task.since):
                task.forgotten = True
                for slot in task.slots.values():
                    self._drop(slot)
                emissions += self._close(task_id, task)
        return emissions

    def _check(self, head: TaskHead, task: JoinState | None) -> None:
        """Raises InvalidRecord for a head that breaks a limit or does not match the task it names."""
        limits = self._limits
        if head.n_samples > limits.max_samples:
            raise InvalidRecord(
                f"task {head.task_id} asks for {head.n_samples} samples; the limit is {limits.max_samples}"
            )
        if head.terms.deadline_ms >= limits.marker_ttl_ms:
            raise InvalidRecord(
                f"task {head.task_id} has a deadline of {head.terms.deadline_ms} ms; it must be below the "
                f"{limits.marker_ttl_ms} ms for which a closed task is remembered (--marker-ttl of the join)"
            )
        if task is None or task.phase is Phase.UNOPENED:
            return
        if head.n_samples != task.n_samples:
            raise InvalidRecord(
                f"task {head.task_id} has {task.n_samples} samples, but this record says {head.n_samples}"
            )
        if task.phase is Phase.OPEN:
            known = task.parsed_head().terms
            if (head.terms.rl, head.terms.opd) != (known.rl, known.opd):
                raise InvalidRecord(
                    f"task {head.task_id} was opened with terms.rl={known.rl} and terms.opd={known.opd}, but this "
                    f"record has terms.rl={head.terms.rl} and terms.opd={head.terms.opd}: all records of a task must "
                    "have the same"
                )

    def _check_slot(self, half: Score | Hint, slot: Slot, digest: bytes) -> None:
        """Raises InvalidRecord if one result has two answers, or its halves have different tokens."""
        sample = half.sample
        where = f"result {sample.result_id} (task {half.key}, sample {sample.sample_index})"
        if slot.digest != digest:
            raise InvalidRecord(
                f"{where} has the response digest {sample.response_digest}, but its earlier halves have another: a "
                "result id must be derived from the answer"
            )
        other = self._record(slot.hint if isinstance(half, Score) else slot.score)
        if other is None or not other.sample.token_ids or not sample.token_ids:
            return
        if other.sample.token_ids != sample.token_ids:
            raise InvalidRecord(
                f"the halves of {where} have different tokens: this one has {len(sample.token_ids) // 4}, "
                f"the earlier one {len(other.sample.token_ids) // 4}"
            )

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _find(self, task_id: str) -> JoinState | None:
        task = self._open.get(task_id)
        if task is None and (value := self._markers.get(task_id)) is not None:
            task = decode_task(value)
        return task

    def _open_task(self, head: TaskHead, opened_at: int, known: JoinState | None) -> tuple[JoinState, list[Emission]]:
        """Opens a task. If its deadline has passed already, it closes immediately, like any task at its deadline.

        A task cannot have opened after the record that announces it, so `opened_at` is capped by stream time.
        """
        since = min(opened_at, self.time)
        task = JoinState(self.applied, Phase.OPEN, since, head.n_samples, head=head)
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

    def _close(self, task_id: str, task: JoinState) -> list[Emission]:
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

    def _touch(self, task_id: str, task: JoinState) -> None:
        """Marks the task as changed by the current record."""
        task.applied = self.applied
        self._changes.header_changed(task_id)
        if task.phase is not Phase.OPEN:
            self._markers.put(task_id, task.since, encode_task(task))

    def _drop(self, slot: Slot) -> None:
        """Drops the halves of a slot."""
        for payload in (slot.score, slot.hint):
            if payload is not None:
                self._changes.drop_payload(payload.offset)
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
                raise DamagedState(
                    f"the half at offset {payload.offset} cannot be read from the state: {error}"
                ) from error
            if not isinstance(record, Score | Hint):
                raise DamagedState(f"the record at offset {payload.offset} is a {type(record).__name__}, not a half")
            payload.record, payload.value = record, b""
            if self._kept is not None:
                self._kept.add(payload, len(value))
        return payload.record


def _ageless(table: StateTable) -> Iterator[tuple[str, bytes]]:
    """Yields the entries for recovery: all but the markers, which are too many; for halves, the keys without values."""
    for key in table.ageless():
        yield key, b"" if key.startswith(HALF) else table[key]


def _lacks(slot: Slot, half: Score | Hint) -> bool:
    return (slot.score if isinstance(half, Score) else slot.hint) is None
