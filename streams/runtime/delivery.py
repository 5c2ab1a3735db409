"""Carries one batch from the log to its confirmed effects. Does not import Faust.

The order of a flush, and the result of a failure at each step (every failure ends the worker before the commit):

1. Outputs and dead letters are sent together and confirmed. On failure: they are sent again; repeated outputs are
   harmless, because they have the same key.
2. State changes are written in order to one partition of the changelog. On failure: a prefix of them is written. They
   are applied again to the offset-stamped state, which recognises them.
3. The local table is updated. This cannot fail.
4. The batch is acknowledged, and the offset after its last record is committed soon after. On failure: the batch is
   delivered again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from schemas.wire.codec import SchemasUnavailable
from streams.runtime.dlq import LettersOnLog, Produce, check, key_bytes, letter, not_skipped, not_written
from streams.runtime.processor import (
    Bounded,
    DamagedState,
    Dead,
    Effects,
    LogRecord,
    OutputRecord,
    Processor,
    Retryable,
    StateUnreadable,
    Timed,
)
from streams.runtime.state import OFFSET_HEADER, Ends, Entry, as_entries
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.service.lifecycle import Unmendable

log = logging.getLogger(__name__)

FRAMING_BYTES = 512
"""Bytes that a record takes in its batch beside key, value and headers."""
ROOM_S = 1.0
NO_OFFSET = -1
"""First offset of changes that no record causes: their deletions are stamped with the offset of the deleted value."""


class OutputTooLarge(ValueError):
    """An output or a state value over the record limit; raised before anything of its batch is sent."""


class RecordSink(Protocol):
    """The destination of records."""

    async def send(self, records: Sequence[Produce]) -> int:
        """Sends all records (at least one), those of one partition in order; returns when every one is confirmed.
        Raises if one is not.

        Returns:
            The offset of the last record on its partition.
        """


class Store(Protocol):
    """The confirmed state of each owned partition: `state.StateStore` or `rocksdb_store.DiskStore`."""

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition's entries. It calls `read` for each entry that is read through it, as a
        sign of progress."""

    def apply(self, partition: int, entries: Sequence[Entry], last: int) -> None:
        """Applies confirmed changes; `last` is the changelog offset of the last one."""

    def distrust(self, partition: int) -> None:
        """Marks the local copy of a partition as damaged: it is rebuilt from the changelog."""


@dataclass(slots=True)
class DeliveryCounts:
    """The values that the metrics report; totals since the start."""

    records: int = 0
    outputs: int = 0
    changes: int = 0
    dead: int = 0
    batches: int = 0
    retries: int = 0
    change_bytes: int = 0
    step_seconds: float = 0.0
    flush_seconds: float = 0.0
    batch_seconds: Callable[[float], None] = field(default=lambda seconds: None)
    finished_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """Monotonic seconds at which effects of a topic-partition's records were last confirmed."""
    progressed_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds up to which every partition made progress: see `streams.runtime.progress`."""
    standing: tuple[str, int] | None = None
    """The topic-partition that has been stalled since `progressed_at`, if any."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between retries while an external service is unavailable: doubling up to a cap."""

    first: float = 0.5
    cap: float = 15.0


def size_of(record: Produce) -> int:
    """Bytes of a record that count towards the record limit."""
    size = len(record.key or b"") + len(record.value or b"") + FRAMING_BYTES
    for name, value in record.headers:
        size += len(name) + len(value or b"") + 8
    return size


class Prepared(NamedTuple):
    """The records that a batch sends, each within the record limit: its outputs, and its state changes in order, both
    as table entries and as changelog records."""

    outputs: Sequence[Produce] = ()
    entries: Sequence[Entry] = ()
    changes: Sequence[Produce] = ()


class BatchRunner:
    """Runs batches of a processor to their confirmed effects.

    Args:
        changelog: topic of the state table's changelog; None if and only if the processor has no table.
        record_limit: bytes of the largest record that the topics accept.
        version: the application's version, for dead letters.
        letters: the dead letters that are on the log already, which are not written again. None: every one is written.
    """

    def __init__(
        self,
        processor: Processor,
        sink: RecordSink,
        *,
        store: Store,
        changelog: str | None,
        limits: DeadLetterLimits,
        record_limit: int,
        version: str,
        backoff: Backoff | None = None,
        counts: DeliveryCounts | None = None,
        letters: LettersOnLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.processor = processor
        self.store = store
        self.counts = counts or DeliveryCounts()
        self.waiting: set[int] = set()
        """Partitions in a Retryable back-off, or waiting for room (see `Bounded`)."""
        self.ends = Ends()
        self._bounded = processor if isinstance(processor, Bounded) else None
        self._moved = asyncio.Event()
        self._sink = sink
        self._changelog = changelog
        self._limits = limits
        self._letters = letters
        self._record_limit = record_limit
        self._version = version
        self._backoff = backoff or Backoff()
        self._clock = clock

    def take_over(self, partition: int) -> None:
        """Restores a partition's state in the processor from the store.

        The duration depends on the size of the state and the speed of the disk, so every entry read counts as
        progress."""
        taking_over = True

        def read() -> None:
            # The processor may keep the view; reads after the restore do not count as progress.
            if taking_over:
                self.counts.progressed_at = time.monotonic()

        try:
            self.processor.restore(partition, self.store.entries(partition, read))
        finally:
            taking_over = False

    async def run(self, partition: int, records: Sequence[LogRecord]) -> None:
        """Runs one batch, or the due timeouts if `records` is empty; returns when all effects are confirmed.

        Raises:
            TooManyDead: a limit of dead letters is exceeded; nothing of the batch was sent.
            StateUnreadable: the state is unreadable; no record is dead-lettered, because the records are not at fault.
            Exception: an effect was not confirmed.
        """
        try:
            await self._run(partition, records)
        except DamagedState:
            self.store.distrust(partition)
            raise

    async def _run(self, partition: int, records: Sequence[LogRecord]) -> None:
        if not records:
            await self.expire(partition)
            return
        if self._bounded is not None and self._bounded.waits(partition):
            await self._room(self._bounded, partition)
        started = time.monotonic()
        await self._process_batch(partition, records)
        self.counts.batches += 1
        self.counts.records += len(records)
        self.counts.batch_seconds(time.monotonic() - started)
        self._moved.set()

    async def _process_batch(self, partition: int, batch: Sequence[LogRecord]) -> None:
        records = batch if self._letters is None else await not_skipped(self._letters, batch)
        if not records:
            await self._flush(partition, batch, Effects(), Prepared(), attempts=1)
            return
        try:
            effects, prepared = await self._process(partition, records)
        except (StateUnreadable, Unmendable):
            raise
        except Exception as error:
            log.exception("%s: a batch of %d failed; its records are now tried one by one", records[0], len(records))
            self._reset(partition)
            await self._one_by_one(partition, records, error)
        else:
            await self._flush(partition, records, effects, prepared, attempts=1)

    async def _room(self, processor: Bounded, partition: int) -> None:
        self.waiting.add(partition)
        try:
            while processor.waits(partition):
                # A batch of another partition, or the revocation of a partition, makes room.
                self._moved.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), ROOM_S)
        finally:
            self.waiting.discard(partition)

    async def expire(self, partition: int) -> None:
        """Carries out the due timeouts of a partition. Raises if an effect is not confirmed."""
        assert isinstance(self.processor, Timed)
        try:
            effects = await self.processor.expire(partition)
        except Retryable as reason:
            log.warning("partition %d: %s; trying again", partition, reason)
            self._reset(partition)
            return
        await self._flush(partition, (), effects, self._prepared(partition, NO_OFFSET, effects), attempts=1)

    async def send_ticks(self, outputs: Sequence[OutputRecord]) -> None:
        """Sends records that no input caused. Raises if one is not confirmed."""
        await self._sink.send([self._checked(_produce(output)) for output in outputs])
        self.counts.outputs += len(outputs)

    async def _one_by_one(self, partition: int, records: Sequence[LogRecord], error: Exception) -> None:
        for record in records:
            if len(records) > 1:
                try:
                    effects, prepared = await self._process(partition, [record])
                except (StateUnreadable, Unmendable):
                    raise
                except Exception as alone:
                    log.exception("%s goes to the dead-letter topic", record)
                    self._reset(partition)
                    error = alone
                else:
                    await self._flush(partition, [record], effects, prepared, attempts=2)
                    continue
            stage = "produce" if isinstance(error, OutputTooLarge) else "process"
            effects = Effects(dead=[Dead.of(record, stage, error)])
            await self._flush(partition, [record], effects, Prepared(), attempts=min(len(records), 2))

    async def _process(self, partition: int, records: Sequence[LogRecord]) -> tuple[Effects, Prepared]:
        delay = self._backoff.first
        while True:
            began = time.monotonic()
            try:
                effects = await self.processor.process(partition, records)
            except (Retryable, SchemasUnavailable) as reason:
                log.warning("%s: %s; trying again in %.1f s", records[0], reason, delay)
                self.counts.retries += 1
                self._reset(partition)
                self.waiting.add(partition)
                try:
                    await asyncio.sleep(delay)
                finally:
                    self.waiting.discard(partition)
                delay = min(delay * 2, self._backoff.cap)
            else:
                self.counts.step_seconds += time.monotonic() - began
                return effects, self._prepared(partition, records[0].offset, effects)

    def _prepared(self, partition: int, first_offset: int, effects: Effects) -> Prepared:
        outputs = [self._checked(_produce(output)) for output in effects.outputs]
        if self._changelog is None:
            if effects.changes:
                raise TypeError(f"{self.processor.app_id} has no table but returned state changes: set Processor.table")
            return Prepared(outputs)
        entries = as_entries(effects.changes, self.store.entries(partition), first_offset)
        return Prepared(outputs, entries, [self._checked(self._change(partition, entry)) for entry in entries])

    async def _flush(
        self,
        partition: int,
        records: Sequence[LogRecord],
        effects: Effects,
        prepared: Prepared,
        *,
        attempts: int,
    ) -> None:
        began = time.monotonic()
        check(self._limits, records, effects.dead)
        sending = list(prepared.outputs)
        new = effects.dead if self._letters is None else await not_written(self._letters, effects.dead)
        for dead in new:
            log.error("dead letter: %s at stage %s: %s: %s", dead.record, dead.stage, dead.error_class, dead.error)
            sending.append(
                letter(
                    dead,
                    group=self.processor.app_id,
                    attempts=attempts,
                    version=self._version,
                    failed_at=self._clock(),
                )
            )
        if sending:
            await self._sink.send(sending)
        if prepared.entries:
            last = await self._sink.send(prepared.changes)
            self.store.apply(partition, prepared.entries, last)
            self.ends.wrote(str(self._changelog), partition, len(prepared.entries), last)
        self.counts.outputs += len(effects.outputs)
        self.counts.dead += len(new)
        self.counts.changes += len(prepared.entries)
        self.counts.change_bytes += sum(len(entry.key) + len(entry.value or b"") for entry in prepared.entries)
        ended = time.monotonic()
        self.counts.flush_seconds += ended - began
        if records:
            self.counts.finished_at[records[0].topic, partition] = ended

    def _change(self, partition: int, entry: Entry) -> Produce:
        return changelog_record(str(self._changelog), partition, entry)

    def _checked(self, record: Produce) -> Produce:
        size = size_of(record)
        if size > self._record_limit:
            raise OutputTooLarge(
                f"a record for {record.topic} (key {record.key!r}) takes {size:,} bytes with key and headers; "
                f"the limit is {self._record_limit:,} bytes (record_limit_bytes in schemas/topics.yaml)"
            )
        return record

    def _reset(self, partition: int) -> None:
        """Resets the processor, which may have stopped half-way through a batch, to the confirmed state."""
        self.processor.revoke(partition)
        self.take_over(partition)


def _produce(output: OutputRecord) -> Produce:
    return Produce(output.topic, key_bytes(output.key), output.value, output.headers, output.partition)


def changelog_record(topic: str, partition: int, entry: Entry) -> Produce:
    """The changelog record of an entry."""
    headers = ((OFFSET_HEADER, str(entry.offset).encode()),) if entry.value is None else ()
    return Produce(topic, key_bytes(entry.key), entry.value, headers, partition)
