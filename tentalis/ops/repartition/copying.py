"""Copies the records of a topic to another topic, and reads a copy back."""

import heapq
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, Message, Producer, TopicPartition

from schemas.place import RecordPlace
from tentalis.kafka.acls import READERS, Operation
from tentalis.kafka.config import consumer_config, producer_config
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.errors import DeliveryFailed, passes, refused, unconfirmed
from tentalis.kafka.identity import OffsetRange
from tentalis.kafka.moved_topics import APPEND_TIME
from tentalis.ops.repartition.digests import PartitionDigests, headers_unchanged
from tentalis.ops.repartition.placement import Headers
from tentalis.service.settings import Settings

PATIENCE_S = 60.0
QUEUED_KB = 4096  # one consumer per partition is open at a time

Targets = Callable[[Message, Headers, bool], Sequence[int]]
"""Returns the new partitions of a record; the last argument is true if some group has not processed it."""


class Writer:
    """Writes records to explicit partitions of one topic and confirms them; `digests` has what was to be written."""

    def __init__(self, settings: Settings, topic: str, partitions: int) -> None:
        self.digests = PartitionDigests(partitions)
        self._producer = Producer(producer_config(settings))
        self._topic = topic
        self._failed: KafkaError | None = None

    def write(self, partition: int, key: bytes | None, value: bytes | None, headers: Headers, timestamp: int) -> int:
        """Queues a record; returns its offset on a topic that was empty. Raises DeliveryFailed."""
        given: dict[str, Any] = {"headers": list(headers), "timestamp": timestamp, "partition": partition}
        while True:
            try:
                self._producer.produce(self._topic, value, key, on_delivery=self._delivered, **given)
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)
        self._check()
        self.digests.add(partition, key, value, headers, timestamp)
        return self.digests.counts[partition] - 1

    def flush(self) -> None:
        """Waits until everything is confirmed. Raises DeliveryFailed."""
        left = self._producer.flush(2 * PATIENCE_S)
        self._check()
        if left:
            raise DeliveryFailed(f"{left} records for {self._topic} were not confirmed: is the broker up?")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._failed = self._failed or unconfirmed(error, message)

    def _check(self) -> None:
        if self._failed is not None:
            raise DeliveryFailed(f"the broker refused a record for {self._topic}: {self._failed.str()}")


@dataclass(slots=True)
class Copied:
    """A finished copy.

    Attributes:
        places: the new place of the records that were asked for, and of all that some group has not processed.
        begin: per consumer group and new partition, the first record that the group has not processed; left out where
            it has processed all.
    """

    digests: PartitionDigests
    places: dict[RecordPlace, RecordPlace] = field(default_factory=dict)
    begin: dict[str, dict[int, int]] = field(default_factory=dict)


def copy_topic(
    settings: Settings,
    topic: str,
    ranges: Mapping[int, OffsetRange],
    into: str,
    partitions: int,
    targets: Targets,
    groups: Mapping[str, Mapping[int, int]],
    wanted: Container[RecordPlace],
) -> Copied:
    """Copies a topic into an empty one: first the records that every group has processed, then the others, each part in
    the order of append times. The order of one key's records is kept.

    Args:
        ranges: the offsets to copy, by partition.
        groups: per consumer group, the first offset that it has not processed, by partition; 0 where it has none.
        wanted: records whose new places are noted.
    """
    writer = Writer(settings, into, partitions)
    copied = Copied(writer.digests)
    done = {
        partition: min([span.end, *(max(span.begin, each.get(partition, 0)) for each in groups.values())])
        for partition, span in ranges.items()
    }
    parts = (
        {partition: OffsetRange(span.begin, done[partition]) for partition, span in ranges.items()},
        {partition: OffsetRange(done[partition], span.end) for partition, span in ranges.items()},
    )
    for unread, part in enumerate(parts):
        for message in merged(settings, topic, part):
            headers = headers_unchanged(message)
            if unread and message.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME:
                headers.append((APPEND_TIME, str(_time(message)).encode()))
            timestamp = _time(message)
            here = RecordPlace(topic, int(message.partition() or 0), int(message.offset() or 0))
            for target in targets(message, headers, bool(unread)):
                there = writer.write(target, message.key(), message.value(), headers, timestamp)
                if unread or here in wanted:
                    copied.places[here] = RecordPlace(topic, target, there)
                for group, consumed in groups.items():
                    if here.offset >= consumed.get(here.partition, 0):
                        copied.begin.setdefault(group, {}).setdefault(target, there)
    writer.flush()
    return copied


def copy_unchanged(settings: Settings, topic: str, into: str, counts: Sequence[int]) -> PartitionDigests:
    """Copies the first records of each partition to the same partition of an empty topic."""
    writer = Writer(settings, into, len(counts))
    for message in _first(settings, topic, counts):
        writer.write(
            int(message.partition() or 0), message.key(), message.value(), headers_unchanged(message), _time(message)
        )
    writer.flush()
    return writer.digests


def read_back(settings: Settings, topic: str, counts: Sequence[int]) -> PartitionDigests:
    """Returns the digests of the first records of each partition, as they are on the log."""
    digests = PartitionDigests(len(counts))
    for message in _first(settings, topic, counts):
        partition = int(message.partition() or 0)
        digests.add(partition, message.key(), message.value(), headers_unchanged(message), _time(message))
    return digests


def merged(settings: Settings, topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[Message]:
    """Yields the records of several partitions by append time; each partition keeps its order."""
    return heapq.merge(
        *(_records(settings, topic, p, span) for p, span in sorted(ranges.items()) if span.begin < span.end), key=_time
    )


def _first(settings: Settings, topic: str, counts: Sequence[int]) -> Iterator[Message]:
    if any(counts):
        yield from messages_to_end(settings, topic, end=dict(enumerate(counts)))


def _time(message: Message) -> int:
    return int(message.timestamp()[1])


def _records(settings: Settings, topic: str, partition: int, span: OffsetRange) -> Iterator[Message]:
    consumer = Consumer(
        consumer_config(settings, READERS)
        | {"enable.partition.eof": True, "fetch.wait.max.ms": 50, "queued.max.messages.kbytes": QUEUED_KB}
    )
    try:
        consumer.assign([TopicPartition(topic, partition, span.begin)])
        waits = time.monotonic()
        while True:
            for message in consumer.consume(500, 0.2):
                error = message.error()
                if error is not None:
                    # The end of the partition may come before `span.end`: transaction markers have offsets too.
                    if error.code() == KafkaError._PARTITION_EOF:
                        return
                    if passes(error):
                        continue
                    raise refused(settings, error, Operation.READ, topic, READERS)
                if int(message.offset() or 0) >= span.end:
                    return
                yield message
                waits = time.monotonic()
                if int(message.offset() or 0) + 1 >= span.end:
                    return
            if time.monotonic() - waits > PATIENCE_S:
                raise TimeoutError(
                    f"nothing was read from {topic}[{partition}] for {PATIENCE_S:g} s: is the broker up?"
                )
    finally:
        consumer.close()
