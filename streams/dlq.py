"""Dead letters of a stream application: how a record that cannot be processed is kept."""

from collections.abc import Sequence
from typing import NamedTuple

from schemas.topics import dlq
from streams.processor import Dead, LogRecord
from tentalis.dlq.context import context_headers
from tentalis.dlq.limits import DeadLimits


class Produce(NamedTuple):
    """Bytes to send. `partition` None: murmur2 of the key."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


def key_bytes(key: str | None) -> bytes | None:
    """A record's key as it was on the log."""
    return None if key is None else key.encode("utf-8", "surrogateescape")


def letter(dead: Dead, *, group: str, attempts: int, version: str, failed_at: float) -> Produce:
    """The dead letter of a record: key and value bytes unchanged, its own headers first, then why it is here.

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


def check(limits: DeadLimits, records: Sequence[LogRecord], dead: Sequence[Dead]) -> None:
    """Counts a batch. Raises TooManyDead, before anything of it is sent."""
    # Dead letters of records read earlier (feedback that waited) say nothing about how this batch went.
    causes = {
        (item.record.topic, item.record.offset): f"at stage {item.stage}: {item.error_class}: {item.error}"
        for item in dead
    }
    limits.check((record, causes.get((record.topic, record.offset))) for record in records)
