"""One batch from the log to its confirmed effects. No Faust in it.

The order of a flush, and what a failure at each step means (all of them end the worker before the commit):

1. Outputs and dead letters are sent at once and confirmed: they will be sent again; repeated outputs are harmless by
   key.
2. State changes, in order on one partition of the changelog: whatever comes of them is a beginning. They are applied
   again to the offset-stamped state, which knows them.
3. The local table: cannot fail.
4. The batch is acknowledged, and the offset after its last record is committed soon after: the batch comes again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from schemas.codec import SchemasUnavailable
from streams.dlq import Produce, check, key_bytes, letter
from streams.processor import (
    Bounded,
    Dead,
    Effects,
    LogRecord,
    Output,
    Processor,
    Retryable,
    StateError,
    StateUnreadable,
    Timed,
)
from streams.state import OFFSET_HEADER, Ends, Entry, as_entries
from tentalis.dlq.limits import DeadLimits
from tentalis.service import Unmendable

log = logging.getLogger(__name__)

FRAMING_BYTES = 512
"""Room that a record needs in its batch beside key, value and headers."""
ROOM_S = 1.0
NO_OFFSET = -1
"""Of changes that no record brings: their deletions are stamped with the offset of what they delete."""


class OutputTooLarge(ValueError):
    """An output or a state value over the record limit: refused here, before anything of its batch is sent."""


class Sink(Protocol):
    """Where records go."""

    async def send(self, records: Sequence[Produce]) -> int:
        """Sends all of them, at least one, those of one partition in order; returns when every one is confirmed. Raises
        if any is not.

        Returns:
            The offset of the last record on its partition.
        """


class Store(Protocol):
    """What the changelog confirmed of each owned partition: `streams.state.StateStore`, `streams.disk.DiskStore`."""

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition; `read` is called for the entries that are read in it."""

    def apply(self, partition: int, entries: Sequence[Entry], last: int) -> None:
        """Takes over confirmed changes; `last` is the changelog offset of the last one."""

    def distrust(self, partition: int) -> None:
        """What is here of a partition is damaged: it is not gone on from, but made anew from the changelog."""


@dataclass(slots=True)
class Counts:
    """What the metrics read; totals since the start."""

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
    """Monotonic seconds at which the effects of records of a topic-partition were last confirmed."""
    progressed_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds up to which everything got on: see `streams.progress`."""
    standing: tuple[str, int] | None = None
    """The topic-partition that has stood still since then, if it is one."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between tries while something outside is away: doubling up to a cap."""

    first: float = 0.5
    cap: float = 15.0


def size_of(record: Produce) -> int:
    """Bytes that a record takes of the limit."""
    size = len(record.key or b"") + len(record.value or b"") + FRAMING_BYTES
    for name, value in record.headers:
        size += len(name) + len(value or b"") + 8
    return size


class Prepared(NamedTuple):
    """What a batch sends, all of it within the record limit: its outputs, and its state changes in order, as
    entries of the table and as records of the changelog."""

    outputs: Sequence[Produce] = ()
    entries: Sequence[Entry] = ()
    changes: Sequence[Produce] = ()


class BatchRunner:
    """Runs batches of a processor to their confirmed effects.

    Args:
        changelog: topic of the state table's changelog; None exactly if the processor has no table.
        record_limit: bytes of the largest record the topics take.
        version: of the application, for dead letters.
    """

    def __init__(
        self,
        processor: Processor,
        sink: Sink,
        *,
        store: Store,
        changelog: str | None,
        limits: DeadLimits,
        record_limit: int,
        version: str,
        backoff: Backoff | None = None,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.processor = processor
        self.store = store
        self.counts = counts or Counts()
        self.waiting: set[int] = set()
        """Partitions in a Retryable back-off, or that wait for room."""
        self.ends = Ends()
        self._bounded = processor if isinstance(processor, Bounded) else None
        self._moved = asyncio.Event()
        self._sink = sink
        self._changelog = changelog
        self._limits = limits
        self._record_limit = record_limit
        self._version = version
        self._backoff = backoff or Backoff()
        self._clock = clock

    def take_over(self, partition: int) -> None:
        """Gives the processor all that the store has of a partition. How long that takes depends on how much is open
        and how fast the disk is, so every entry that is read for it is progress."""
        taking_over = True

        def read() -> None:
            # It may keep the view: what it reads there when it stands still is none.
            if taking_over:
                self.counts.progressed_at = time.monotonic()

        try:
            self.processor.restore(partition, self.store.entries(partition, read))
        finally:
            taking_over = False

    async def run(self, partition: int, records: Sequence[LogRecord]) -> None:
        """One batch, or without records what is due: returns when all it brings about is confirmed.

        Raises:
            TooManyDead: past a limit of dead letters; nothing of the batch was sent.
            StateUnreadable: nothing is wrong with the records, and none is dead-lettered.
            Exception: whatever kept an effect from being confirmed.
        """
        try:
            await self._run(partition, records)
        except StateError:
            self.store.distrust(partition)
            raise

    async def _run(self, partition: int, records: Sequence[LogRecord]) -> None:
        if not records:
            await self.expire(partition)
            return
        if self._bounded is not None and self._bounded.waits(partition):
            await self._room(self._bounded, partition)
        started = time.monotonic()
        try:
            effects, prepared = await self._process(partition, records)
        except (StateUnreadable, Unmendable):
            raise
        except Exception as error:
            log.exception("%s: a batch of %d failed; one by one now", records[0], len(records))
            self._reset(partition)
            await self._one_by_one(partition, records, error)
        else:
            await self._flush(partition, records, effects, prepared, attempts=1)
        self.counts.batches += 1
        self.counts.records += len(records)
        self.counts.batch_seconds(time.monotonic() - started)
        self._moved.set()

    async def _room(self, processor: Bounded, partition: int) -> None:
        self.waiting.add(partition)
        try:
            while processor.waits(partition):
                # Room comes from a batch of another partition, or with a partition that is taken away.
                self._moved.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), ROOM_S)
        finally:
            self.waiting.discard(partition)

    async def expire(self, partition: int) -> None:
        """What time alone brings about in a partition. Raises whatever kept an effect from being confirmed."""
        assert isinstance(self.processor, Timed)
        try:
            effects = await self.processor.expire(partition)
        except Retryable as reason:
            log.warning("partition %d: %s; trying again", partition, reason)
            self._reset(partition)
            return
        await self._flush(partition, (), effects, self._prepared(partition, NO_OFFSET, effects), attempts=1)

    async def send_ticks(self, outputs: Sequence[Output]) -> None:
        """Records beside any input. Raises what kept them from being confirmed."""
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
        for dead in effects.dead:
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
        self.counts.dead += len(effects.dead)
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
        """The processor may have gone half-way through a batch: its state is again what the changelog confirmed."""
        self.processor.revoke(partition)
        self.take_over(partition)


def _produce(output: Output) -> Produce:
    return Produce(output.topic, key_bytes(output.key), output.value, output.headers, output.partition)


def changelog_record(topic: str, partition: int, entry: Entry) -> Produce:
    """How an entry is written to the changelog."""
    headers = ((OFFSET_HEADER, str(entry.offset).encode()),) if entry.value is None else ()
    return Produce(topic, key_bytes(entry.key), entry.value, headers, partition)
