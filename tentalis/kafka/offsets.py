"""The first and last offsets of partitions, and the committed offsets of a consumer group."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tentalis.kafka import topology
from tentalis.kafka.acls import READERS, Operation
from tentalis.kafka.config import consumer_config
from tentalis.kafka.errors import DENIED, ELECTING, NoSuchTopic, passes, refused
from tentalis.kafka.identity import CommittedOffset
from tentalis.kafka.topic_client import (
    PATIENCE_S,
    TOPIC_PATIENCE_S,
    asked_again,
    committed_notes,
    known_offset,
    offset_of_time,
)
from tentalis.service.settings import Settings

T = TypeVar("T")


def _partitions(settings: Settings, consumer: Consumer, topic: str) -> list[int]:
    deadline = time.monotonic() + TOPIC_PATIENCE_S
    while (metadata := consumer.list_topics(topic, timeout=15).topics[topic]).error is not None:
        # A broker that has just started does not know its topics immediately.
        if metadata.error.code() in ELECTING and time.monotonic() < deadline:
            time.sleep(0.2)
            continue
        if metadata.error.code() in DENIED:
            raise refused(settings, metadata.error, Operation.READ, topic)
        ours = topic in topology.topic_table().topics
        remedy = "`tentalis topics apply` creates it" if ours else "`tentalis topics list` lists its topics"
        raise NoSuchTopic(f"the broker has no topic {topic}: {metadata.error.str()}. {remedy}")
    return sorted(metadata.partitions)


def _answer(settings: Settings, topic: str, ask: Callable[[], T], patience: float = PATIENCE_S) -> T:
    """The answer to a question about the offsets of a topic; see `asked_again`."""
    try:
        return asked_again(ask, patience)
    except KafkaException as error:
        raise refused(settings, error.args[0], Operation.DESCRIBE, topic) from error


def _watermarks(
    settings: Settings, consumer: Consumer, topic: str, partition: int, patience: float = PATIENCE_S
) -> tuple[int, int]:
    """(first offset, offset after the last committed record); `patience` as in `asked_again`."""
    place = TopicPartition(topic, partition)

    def ask() -> tuple[int, int]:
        low, high = consumer.get_watermark_offsets(place, timeout=15)
        return known_offset(low), known_offset(high)

    return _answer(settings, topic, ask, patience)


def end_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """The offset after the last committed record, per partition. Raises NoSuchTopic."""
    consumer = Consumer(consumer_config(settings, READERS))
    try:
        return {p: _watermarks(settings, consumer, topic, p)[1] for p in _partitions(settings, consumer, topic)}
    finally:
        consumer.close()


def offset_ranges(settings: Settings, topic: str) -> dict[int, tuple[int, int]]:
    """The first offset and the end offset (as `end_offsets`), per partition. Raises NoSuchTopic."""
    consumer = Consumer(consumer_config(settings, READERS))
    try:
        return {p: _watermarks(settings, consumer, topic, p) for p in _partitions(settings, consumer, topic)}
    finally:
        consumer.close()


def offsets_at(settings: Settings, topic: str, time_ms: int) -> dict[int, int | None]:
    """The offset of the first record with this timestamp or a later one, per partition; None if there is none.

    Raises NoSuchTopic, KafkaException, Forbidden.
    """
    consumer = Consumer(consumer_config(settings, READERS))
    try:
        # A negative time has a special meaning in Kafka.
        places = [TopicPartition(topic, p, max(0, time_ms)) for p in _partitions(settings, consumer, topic)]

        def ask() -> dict[int, int | None]:
            found = consumer.offsets_for_times(places, timeout=15)
            return {int(place.partition): offset_of_time(place.offset) for place in found}

        return _answer(settings, topic, ask)
    finally:
        consumer.close()


def oldest_records(
    settings: Settings, starts: Mapping[tuple[str, int], int], timeout: float = 30.0
) -> dict[tuple[str, int], int]:
    """The timestamp (ms) of the first record at or after an offset, per (topic, partition); left out if there is none.

    Offsets may be in use without a record: transaction markers, and records that compaction removed.
    Raises TimeoutError, KafkaException.
    """
    if not starts:
        return {}
    small = {"enable.partition.eof": True, "queued.max.messages.kbytes": 1024, "fetch.wait.max.ms": 50}
    consumer = Consumer(consumer_config(settings, READERS) | small)
    found: dict[tuple[str, int], int] = {}
    try:
        consumer.assign([TopicPartition(topic, p, offset) for (topic, p), offset in starts.items()])
        left, deadline = set(starts), time.monotonic() + timeout
        while left:
            for message in consumer.consume(500, 0.2):
                place, error = (str(message.topic()), int(message.partition())), message.error()
                if error is None and place in left:
                    found[place] = int(message.timestamp()[1])
                elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if not passes(error):
                        raise refused(settings, error, Operation.READ, place[0], READERS)
                    continue
                if place in left:
                    left.discard(place)
                    consumer.incremental_unassign([TopicPartition(*place)])
            if left and time.monotonic() > deadline:
                names = ", ".join(sorted({topic for topic, _ in left}))
                raise TimeoutError(f"no record from {names} within {timeout:g} s: is the broker healthy?")
    finally:
        consumer.close()
    return found


def without_markers(settings: Settings, starts: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """Returns the offsets, per (topic, partition), that have a record at or after them.

    Only topics that are written in transactions are read: a transaction ends with a marker, an offset without a record.
    Raises TimeoutError, KafkaException.
    """
    marked = {place: offset for place, offset in starts.items() if place[0] in topology.transactional_topics()}
    found = oldest_records(settings, marked)
    return {place: offset for place, offset in starts.items() if place not in marked or place in found}


def commit_offsets(settings: Settings, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
    """Commits offsets for a group without members. The broker refuses it while the group has members.

    The notes of the offsets before are kept: they tell of a lost topic. Raises KafkaException, Forbidden,
    CommitsUnknown.
    """
    before = committed_notes(settings, group, offsets)
    notes = {place: None if (found := before.get(place)) is None else found.note for place in offsets}
    commit_noted(settings, group, {place: CommittedOffset(offsets[place], notes[place]) for place in offsets})


def commit_noted(settings: Settings, group: str, offsets: Mapping[tuple[str, int], CommittedOffset]) -> None:
    """Commits offsets with their notes for a group without members. Raises KafkaException, Forbidden."""
    consumer = Consumer(consumer_config(settings, group))
    try:
        places = [
            TopicPartition(*place, each.offset, **({} if each.note is None else {"metadata": each.note.text()}))
            for place, each in offsets.items()
        ]
        done = consumer.commit(offsets=places, asynchronous=False)
    except KafkaException as error:
        raise refused(settings, error.args[0], Operation.READ, next(iter(offsets))[0], group) from error
    finally:
        consumer.close()
    for place in done:
        if place.error is not None:
            raise refused(settings, place.error, Operation.READ, place.topic, group)


def committed_offsets(settings: Settings, group: str, topic_names: Iterable[str]) -> dict[tuple[str, int], int]:
    """The committed offset of a group, per (topic, partition); partitions without one are left out.

    Uses a consumer that never joins: librdkafka 2.16's AdminClient.list_consumer_group_offsets crashes the process
    while the group's coordinator is still loading. Raises NoSuchTopic, KafkaException.
    """
    consumer = Consumer(consumer_config(settings, group))
    try:
        places = [TopicPartition(name, p) for name in topic_names for p in _partitions(settings, consumer, name)]
        committed = consumer.committed(places, timeout=15)
        return {(str(place.topic), int(place.partition)): int(place.offset) for place in committed if place.offset >= 0}
    finally:
        consumer.close()
