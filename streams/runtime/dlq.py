"""Dead letters of a stream application: copies of the records that it cannot process."""

import asyncio
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from schemas.topics import dlq
from streams.runtime.processor import Dead, LogRecord
from tentalis.dlq.context import context_headers
from tentalis.dlq.limits import DeadLetterLimits


class Produce(NamedTuple):
    """A record to send, as bytes. `partition` None: murmur2 of the key."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


def key_bytes(key: str | None) -> bytes | None:
    """A record's key as bytes, as on the log."""
    return None if key is None else key.encode("utf-8", "surrogateescape")


def letter(dead: Dead, *, group: str, attempts: int, version: str, failed_at: float) -> Produce:
    """The dead letter of a record: key and value bytes unchanged, the record's headers, then headers on the failure.

    Args:
        failed_at: seconds since the epoch.
    """
    record = dead.record
    headers = context_headers(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp=record.timestamp,
        group=group,
        error_class=dead.error_class,
        error=dead.error,
        stage=dead.stage,
        attempts=attempts,
        version=version,
        failed_at=failed_at,
    )
    value = None if record.tombstone else record.value
    return Produce(dlq(record.topic), key_bytes(record.key), value, record.headers + headers, record.partition)


class LettersOnLog(Protocol):
    """The letters that are on the log already: `tentalis.dlq.written.WrittenLetters`. `look_up` blocks."""

    def covers(self, record: LogRecord) -> bool:
        """True if questions about the record need no `look_up`."""

    def look_up(self, record: LogRecord) -> object:
        """Reads the letters of the record's partition."""

    def has(self, record: LogRecord) -> bool:
        """True if the record has a letter."""

    def has_skips(self, topic: str, partition: int) -> bool:
        """True if an operator skipped records of the partition."""

    def skipped(self, record: LogRecord) -> bool:
        """True if an operator skipped the record."""


async def not_skipped(letters: LettersOnLog, records: Sequence[LogRecord]) -> Sequence[LogRecord]:
    """Returns the records of a partition that no operator skipped."""
    earliest = await _look_up(letters, records)
    if not any(letters.has_skips(record.topic, record.partition) for record in earliest):
        return records
    return [record for record in records if not letters.skipped(record)]


async def not_written(letters: LettersOnLog, dead: Sequence[Dead]) -> list[Dead]:
    """Returns the dead records of a partition that have no letter yet."""
    await _look_up(letters, [item.record for item in dead])
    return [item for item in dead if not letters.has(item.record)]


async def _look_up(letters: LettersOnLog, records: Sequence[LogRecord]) -> Collection[LogRecord]:
    """Reads what the questions about the records need; returns the earliest record of each topic."""
    earliest: dict[str, LogRecord] = {}
    for record in records:
        known = earliest.get(record.topic)
        if known is None or record.timestamp < known.timestamp:
            earliest[record.topic] = record
    for record in earliest.values():
        if not letters.covers(record):
            await asyncio.to_thread(letters.look_up, record)
    return earliest.values()


def check(limits: DeadLetterLimits, records: Sequence[LogRecord], dead: Sequence[Dead]) -> None:
    """Counts a batch. Raises TooManyDead before anything of the batch is sent."""
    # Dead letters of records read earlier (feedback that waited) do not count as failures of this batch.
    causes = {
        (item.record.topic, item.record.offset): f"at stage {item.stage}: {item.error_class}: {item.error}"
        for item in dead
    }
    limits.check((record, causes.get((record.topic, record.offset)), record.key) for record in records)
