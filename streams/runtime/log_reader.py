"""Reads single records of the log again, by offset."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Protocol

from confluent_kafka import Message

from streams.runtime.processor import LogRecord, Retryable
from tentalis.kafka.record_reader import NEAR, RecordReader, Unread
from tentalis.service.settings import Settings

PATIENCE_S = 30.0
MOST_BYTES = 8 * 2**20
"""Byte limit of one answer; the record that exceeds it is the last one."""
FETCH = {
    # Only one record is needed at a time: do not fetch megabytes after it (larger records are still fetched).
    "fetch.wait.max.ms": 10,
    "fetch.message.max.bytes": 2**18,
    "fetch.max.bytes": 2**20 + 2**24,
    "queued.min.messages": NEAR,
    "queued.max.messages.kbytes": 2**11,
    # Reading consecutive records empties the queue immediately; by default a full queue is not refilled for 1 s.
    "fetch.queue.backoff.ms": 5,
}


class LogReader(Protocol):
    """Reads records again by offset."""

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Mapping[int, LogRecord | None]:
        """The records at the lowest of these offsets, in order: at least one, and as many as a byte limit allows.
        None for a record that is gone (retention); offsets beyond the limit are missing in the answer.

        Raises:
            Retryable: the log cannot be read now.
        """


class KafkaLogReader:
    """Reads from Kafka, in a thread."""

    def __init__(self, settings: Settings) -> None:
        self._reader = RecordReader(settings, FETCH, patience_s=PATIENCE_S, most_bytes=MOST_BYTES)

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Mapping[int, LogRecord | None]:
        """See LogReader."""
        if not offsets:
            return {}
        try:
            found = await asyncio.to_thread(self._reader.read, topic, partition, offsets)
        except Unread as error:
            raise Retryable(str(error)) from error
        return {offset: None if message is None else log_record(message) for offset, message in found.items()}


def log_record(message: Message) -> LogRecord:
    """Converts a message of confluent-kafka."""
    key, value = message.key(), message.value()
    return LogRecord(
        str(message.topic()),
        int(message.partition()),
        int(message.offset()),
        int(message.timestamp()[1]),
        None if key is None else bytes(key).decode("utf-8", "surrogateescape"),
        b"" if value is None else value,
        tuple((name, value or b"") for name, value in message.headers() or ()),
        value is None,
    )
