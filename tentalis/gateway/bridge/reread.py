"""Reads single records again, by where they lie."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.codec import Codec, DecodeError, SchemasUnavailable
from schemas.records import Record
from tentalis.acls import READERS
from tentalis.config import Settings
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.failure import Refused
from tentalis.kafka import consumer_config, passes

R = TypeVar("R", bound=Record)

PATIENCE_S = 5.0
# An offset at most this much further on is read on to, to any other the consumer jumps.
NEAR = 100
MOST_BYTES = 64 * 2**20
MOST_WAITING = 256


class Reread:
    """One consumer in no group, on a thread of its own; one reading at a time, the others wait their turn."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings, self._codec = settings, codec
        self._consumer: Consumer | None = None
        # Not the event loop's own threads: whoever writes turns down needs those, however many ask here.
        self._thread = ThreadPoolExecutor(1, "bridge-reread")
        self._waiting = 0

    async def records(self, facts: Sequence[Fact], kind: type[R]) -> list[tuple[Fact, R]]:
        """The records of that kind that lie there, in the order of topic, partition and offset; what is gone, or was
        never readable, is left out. Raises Refused (503)."""
        if not facts:
            return []
        if self._waiting >= MOST_WAITING:
            raise _away(f"{MOST_WAITING} others ask")
        ordered = sorted(facts, key=lambda fact: (fact.topic, fact.partition, fact.offset))
        self._waiting += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._records, ordered)
        finally:
            self._waiting -= 1
        return [(fact, record) for fact, record in found if isinstance(record, kind)]

    def _records(self, facts: list[Fact]) -> list[tuple[Fact, Record]]:
        found = []
        for fact, value in self._read(facts):
            expected = topics.table().records_of(fact.topic)
            try:
                record = self._codec.decode(
                    value, topic=fact.topic, partition=fact.partition, offset=fact.offset, expected=expected
                )
            except DecodeError:  # its owner dead-letters it
                continue
            except SchemasUnavailable as error:
                raise _away(str(error)) from error
            found.append((fact, record))
        return found

    def _read(self, facts: list[Fact]) -> list[tuple[Fact, bytes]]:
        try:
            if self._consumer is None:
                config = consumer_config(self._settings, READERS)
                self._consumer = Consumer(config | {"enable.partition.eof": True, "fetch.wait.max.ms": 50})
            found: list[tuple[Fact, bytes]] = []
            for _, there in groupby(facts, key=lambda fact: (fact.topic, fact.partition)):
                found += self._read_partition(self._consumer, list(there))
            self._consumer.unassign()
        except (KafkaException, TimeoutError) as error:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
            raise _away(str(error)) from error
        return found

    def _read_partition(self, consumer: Consumer, facts: list[Fact]) -> list[tuple[Fact, bytes]]:
        found: list[tuple[Fact, bytes]] = []
        position, size = -NEAR - 1, 0
        for fact in facts:
            if fact.offset < position:
                continue  # passed: compacted, or a transaction's marker
            if fact.offset - position > NEAR:
                consumer.assign([TopicPartition(fact.topic, fact.partition, fact.offset)])
            message = _up_to(consumer, fact)
            if message is None:
                break
            position = int(message.offset()) + 1
            value = message.value()
            if message.offset() == fact.offset and value is not None:
                found.append((fact, value))
                size += len(value)
            if size > MOST_BYTES:
                break
        return found

    def close(self) -> None:
        """Leaves, after what is under way."""
        self._thread.shutdown(cancel_futures=True)
        if self._consumer is not None:
            self._consumer.close()


def _away(why: str) -> Refused:
    return Refused(503, f"the log cannot be read now ({why}): ask again", "api_error", retry_after_s=2)


def _up_to(consumer: Consumer, fact: Fact) -> Message | None:
    """The first message at or after the fact's offset; None if the partition ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is None:
            continue
        error = message.error()
        if error is None:
            if message.topic() == fact.topic and int(message.offset()) >= fact.offset:
                return message
        elif error.code() == KafkaError._PARTITION_EOF:
            return None
        elif not passes(error):
            raise KafkaException(error)
    raise TimeoutError(f"{fact.topic} gave nothing for {PATIENCE_S:g} s")
