"""Decoding of log records and encoding of outputs, shared by scoring, hinting and aggregation."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from schemas import topics
from schemas.records import Feedback, Record, Result
from schemas.wire.codec import Codec, DecodeError
from streams.runtime.placement import Misplaced, check_place
from streams.runtime.processor import Dead, LogRecord, OutputRecord
from tentalis.kafka.producer import headers_of
from tentalis.rewards.verdict import RewardError

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class KeyMismatch(ValueError):
    """A record with a Kafka key other than its own: it may lie on a partition where no reader looks for it."""


PAIRED = (Result, Feedback)
"""Record types that are paired because they lie on the same partition."""

INVALID = (DecodeError, KeyMismatch, Misplaced, RewardError)
"""Errors that mean that a record is invalid, not that the application failed."""


def decoded(codec: Codec, record: LogRecord, kind: type[R]) -> R:
    """Decodes a record as the one type that its topic holds.

    Raises:
        DecodeError: the bytes are not such a record, or the record is a tombstone.
        KeyMismatch: the Kafka key is not the record's.
        Misplaced: a record to be paired lies on another partition than its key's.
    """
    began = time.perf_counter()
    value = codec.decode(
        None if record.tombstone else record.value,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        expected=topics.table().records_of(record.topic),
    )
    codec.decode_seconds += time.perf_counter() - began
    if not isinstance(value, kind):
        raise TypeError(f"{record.topic} holds {type(value).__name__} records, not {kind.__name__}")
    if value.key != record.key:
        raise KeyMismatch(f"{record}: the Kafka key is {record.key!r}, but the record's own is {value.key!r}")
    if kind in PAIRED:
        check_place(record)
    return value


def dead(record: LogRecord, error: Exception) -> Dead:
    """Returns the dead letter of a record that could not be decoded or is not valid."""
    return Dead.of(record, error.stage if isinstance(error, DecodeError) else "validate", error)


def output(codec: Codec, topic: str, record: Record, source: str, traceparent: str | None = None) -> OutputRecord:
    """Returns a record to produce, with its CloudEvents headers and its trace."""
    return OutputRecord(topic, record.key, codec.encode(topic, record), tuple(headers_of(record, source, traceparent)))


async def together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits the calls and returns their results in order. The first failure cancels the unfinished calls and is
    raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Skipped:
    """Counts records that are not processed here; logs the first, the tenth, the hundredth, and so on."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, record: LogRecord, error: Exception) -> None:
        """Counts one more record."""
        self.count += 1
        if self.count == 10 ** (len(str(self.count)) - 1):
            log.warning("%s skipped (%d so far): %s", record, self.count, error)
