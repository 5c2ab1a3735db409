"""From log records to records of ours and back: what scoring, hinting and aggregation do alike at their edges."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Feedback, Record, Result
from streams.placement import Misplaced, check_place
from streams.processor import Dead, LogRecord, Output
from tentalis.kafka import headers_of
from tentalis.rewards import RewardError

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class KeyMismatch(ValueError):
    """A record under another key than its own: it may lie on a partition where nobody looks for it."""


PAIRED = (Result, Feedback)
"""What finds each other by lying on the same partition."""

INVALID = (DecodeError, KeyMismatch, Misplaced, RewardError)
"""What says of a record that it is not valid, and not of the application that it fails."""


def decoded(codec: Codec, record: LogRecord, kind: type[R]) -> R:
    """The record of the one kind that its topic holds.

    Raises:
        DecodeError: bytes that are no such record, a tombstone among them.
        KeyMismatch: the Kafka key is not the record's.
        Misplaced: it would be paired, and lies on another partition than its key's.
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
    """The dead letter of a record that could not be decoded or is not valid."""
    return Dead.of(record, error.stage if isinstance(error, DecodeError) else "validate", error)


def output(codec: Codec, topic: str, record: Record, source: str, traceparent: str | None = None) -> Output:
    """A record to produce, with its CloudEvents headers and its trace."""
    return Output(topic, record.key, codec.encode(topic, record), tuple(headers_of(record, source, traceparent)))


async def together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The answers in order. The first failure cancels what is still under way, and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Skipped:
    """Counts records that another application dead-letters; the first, and then each tenfold, is logged."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, record: LogRecord, error: Exception) -> None:
        """One more."""
        self.count += 1
        if self.count == 10 ** (len(str(self.count)) - 1):
            log.warning("%s skipped (%d so far): %s", record, self.count, error)
