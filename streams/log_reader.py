"""Reads single records again, by their offset."""

import asyncio
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from streams.processor import LogRecord, Retryable
from tentalis.config import Settings

NEAR = 100
"""A record that lies at most this many offsets further on is read on to; to any other the reader jumps."""
NOWHERE = -NEAR - 1
PATIENCE_S = 30.0
MOST_BYTES = 8 * 2**20
"""Of one answer; the record that goes over it is its last."""


class LogReader(Protocol):
    """Where records are read again."""

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Mapping[int, LogRecord | None]:
        """The records at the first of these offsets, in their order: at least one, and as many as a bound in bytes
        allows. None for one that is gone (retention); what the bound left out is not in the answer.

        Raises:
            Retryable: the log cannot be read now.
        """


class KafkaLogReader:
    """Reads through a consumer of its own that belongs to no group, made when it is first needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._consumer: Any = None
        # A cancelled call leaves its thread behind: the next one must not use the consumer beside it.
        self._turn = threading.Lock()

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Mapping[int, LogRecord | None]:
        """See LogReader."""
        if not offsets:
            return {}
        return await asyncio.to_thread(self._read, topic, partition, sorted(offsets))

    def _read(self, topic: str, partition: int, offsets: list[int]) -> dict[int, LogRecord | None]:
        from confluent_kafka import KafkaException

        with self._turn:
            found: dict[int, LogRecord | None] = {}
            try:
                position, size = NOWHERE, 0
                for offset in offsets:
                    found[offset] = None
                    if offset < position:
                        continue  # passed: there is nothing at this offset
                    record = self._read_on(topic, partition, offset, jump=offset - position > NEAR)
                    position = offset + 1 if record is None else record.offset + 1
                    if record is not None and record.offset == offset:
                        found[offset] = record
                        size += len(record.value)
                        if size > MOST_BYTES:
                            break
            except KafkaException as error:
                raise Retryable(f"{topic}[{partition}] cannot be read again: {error.args[0].str()}") from error
            finally:
                if self._consumer is not None:
                    self._consumer.unassign()  # else it goes on fetching
            return found

    def _read_on(self, topic: str, partition: int, offset: int, *, jump: bool) -> LogRecord | None:
        """Reads up to an offset; returns the first record there or further on, None if there is none."""
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        from tentalis.kafka import TRANSIENT

        if self._consumer is None:
            self._consumer = self._connected()
        if jump:
            self._consumer.assign([TopicPartition(topic, partition, offset)])
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET):
                    return None
                if error.retriable() or error.code() in TRANSIENT:
                    continue
                raise KafkaException(error)
            if (message.topic(), message.partition()) != (topic, partition):
                continue  # of the assignment before
            record = _log_record(message)
            if record.offset >= offset:
                return record
        # librdkafka can miss that a partition has a leader again, and stay silent for minutes: another asks next time.
        self._consumer.close()
        self._consumer = None
        raise Retryable(f"{topic}[{partition}] cannot be read again: nothing at offset {offset} for {PATIENCE_S:g} s")

    def _connected(self) -> Any:
        from confluent_kafka import Consumer

        from tentalis.kafka import consumer_config

        # One record is wanted at a time: do not fetch megabytes behind it (a larger record is fetched all the same).
        config = {
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "fetch.message.max.bytes": 2**18,
            "fetch.max.bytes": 2**20 + 2**24,
            "queued.min.messages": NEAR,
            "queued.max.messages.kbytes": 2**11,
            # A sweep empties the queue at once: the default is to leave a full one alone for a second.
            "fetch.queue.backoff.ms": 5,
        }
        return Consumer(consumer_config(self._settings, "tentalis-reader") | config)


def _log_record(message: Any) -> LogRecord:
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
