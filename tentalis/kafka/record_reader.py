"""Reads single records again, by topic, partition and offset."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tentalis.kafka.acls import READERS
from tentalis.kafka.config import consumer_config
from tentalis.kafka.errors import passes
from tentalis.service.settings import Settings

NEAR = 100
"""To reach a record at most this many offsets ahead, the reader reads on; otherwise it seeks."""
NOWHERE, END = -NEAR - 1, 2**63
"""Positions of a consumer that must seek, and of one that has reached the end of the partition."""
POLL_S = 0.2


class Unread(Exception):
    """A record that could not be read now: the broker failed, or did not answer in time."""


class RecordReader:
    """Reads through a separate consumer without group membership, created when it is first needed. Calls block, and run
    one at a time.

    Args:
        config: librdkafka settings besides those of every consumer.
        patience_s: seconds to wait for one record.
        most_bytes: byte limit of one answer; the record that exceeds it is the last one.
    """

    def __init__(
        self, settings: Settings, config: Mapping[str, Any] | None = None, *, patience_s: float, most_bytes: int
    ) -> None:
        self._settings, self._config = settings, dict(config or {})
        self._patience_s, self._most_bytes = patience_s, most_bytes
        self._consumer: Consumer | None = None
        # The thread of a call that was cancelled keeps running: the next call must wait for it.
        self._turn = threading.Lock()

    def read(self, topic: str, partition: int, offsets: Iterable[int]) -> dict[int, Message | None]:
        """Returns the messages at the lowest of these offsets, in order: at least one, and as many as the byte limit
        allows. None for a record that is gone (retention, compaction); offsets beyond the limit are missing.

        Raises Unread. The next call then creates a new consumer: librdkafka can miss that a partition has a leader
        again, and stay silent for minutes.
        """
        with self._turn:
            try:
                if self._consumer is None:
                    self._consumer = self._connected()
                found = self._found(self._consumer, topic, partition, sorted(set(offsets)))
                self._consumer.unassign()  # else it keeps fetching
            except (KafkaException, TimeoutError) as error:
                self._drop()
                why = error.args[0].str() if isinstance(error, KafkaException) else str(error)
                raise Unread(f"{topic}[{partition}] cannot be read again: {why}") from error
            return found

    def close(self) -> None:
        """Closes the consumer, after the running call."""
        with self._turn:
            self._drop()

    def _found(self, consumer: Consumer, topic: str, partition: int, offsets: list[int]) -> dict[int, Message | None]:
        found: dict[int, Message | None] = {}
        position, size = NOWHERE, 0
        for offset in offsets:
            found[offset] = None
            if offset < position:
                continue  # already passed: no record has this offset
            if offset - position > NEAR:
                consumer.assign([TopicPartition(topic, partition, offset)])
            position, message = self._up_to(consumer, topic, partition, offset)
            if message is not None and message.offset() == offset:
                found[offset] = message
                size += len(message.value() or b"")
                if size > self._most_bytes:
                    break
        return found

    def _up_to(self, consumer: Consumer, topic: str, partition: int, offset: int) -> tuple[int, Message | None]:
        """Reads up to an offset; returns the new position, and the first message at or after the offset, None if there
        is none or the offset is before the first one of the partition."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            message = consumer.poll(POLL_S)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    return END, None
                if error.code() == KafkaError._AUTO_OFFSET_RESET:
                    return NOWHERE, None  # the consumer stays where it is until it seeks
                if not passes(error):
                    raise KafkaException(error)
            # Messages of the previous assignment may still come.
            elif (message.topic(), message.partition()) == (topic, partition) and int(message.offset()) >= offset:
                return int(message.offset()) + 1, message
        raise TimeoutError(f"no record at or after offset {offset} within {self._patience_s:g} s")

    def _connected(self) -> Consumer:
        own = {"auto.offset.reset": "error", "enable.partition.eof": True}
        return Consumer(consumer_config(self._settings, READERS) | own | self._config)

    def _drop(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
