"""Reads records: a topic up to its current end, a topic as it grows, or as a member of a consumer group."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Record
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.acls import FOLLOWERS, READERS, Operation
from tentalis.kafka.config import consumer_config
from tentalis.kafka.errors import passes, refused
from tentalis.kafka.identity import CommittedOffset, PartitionLoss, PartitionRecord, partition_losses
from tentalis.kafka.offsets import _partitions, _watermarks
from tentalis.kafka.skipped import WITHOUT_HEADERS
from tentalis.kafka.topic_client import TIMEOUT_S, TopicClient, asked_again
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

IDLE_WAIT_MS, TO_END_WAIT_MS = 500, 50
"""How long the broker holds a fetch that finds nothing: of a follower, and of a reader that ends at the end."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as stored on the log. `raw_key` holds the bytes of `key`, which may not be valid UTF-8."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: str | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    raw_key: bytes | None = None

    @property
    def place(self) -> RecordPlace:
        return RecordPlace(self.topic, self.partition, self.offset)

    def __str__(self) -> str:
        return str(self.place)

    @classmethod
    def of(cls, message: Message) -> "Stored":
        key = message.key()
        return cls(
            str(message.topic()),
            int(message.partition()),
            int(message.offset()),
            int(message.timestamp()[1]),
            None if key is None else bytes(key).decode("utf-8", "replace"),
            message.value(),
            tuple((name, value or b"") for name, value in headers_in(message)),
            key,
        )

    def decode(self, codec: Codec) -> Record:
        """Decodes a record of one of our topics. Raises DecodeError."""
        expected = topics.table().records_of(self.topic)
        return codec.decode(
            self.value, topic=self.topic, partition=self.partition, offset=self.offset, expected=expected
        )

    def decode_own(self, codec: Codec) -> Record:
        """Like `decode`, and checks that the Kafka key is the record's own: under another key, compaction and
        partitioning are wrong for it. Raises DecodeError."""
        record = self.decode(codec)
        if record.key != self.key:
            raise DecodeError(
                f"the Kafka key is {self.key!r}, but the record's own key is {record.key!r}",
                topic=self.topic,
                partition=self.partition,
                offset=self.offset,
                schema=type(record).__name__,
                stage="validate",
            )
        return record


def headers_in(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    """The headers of a message; empty, with a warning, if a header name is not UTF-8: the client then cannot read any
    of them, but the record itself is still valid.
    """
    try:
        return tuple(message.headers() or ())
    except (SystemError, UnicodeDecodeError):
        place = RecordPlace(message.topic(), message.partition(), message.offset())
        WITHOUT_HEADERS.add(place)
        return ()


def read_to_end(
    settings: Settings,
    topic: str,
    *,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    timeout: float = 60.0,
) -> Iterator[Stored]:
    """Yields every record from `start` (default: the beginning) to the current end of the topic (or `end`), in order
    within each partition.

    Uses no consumer group. Raises NoSuchTopic, and TimeoutError if nothing arrives for `timeout` seconds.
    """
    return map(Stored.of, messages_to_end(settings, topic, start=start, end=end, timeout=timeout))


def messages_to_end(
    settings: Settings,
    topic: str,
    *,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    timeout: float = 60.0,
) -> Iterator[Message]:
    """Like `read_to_end`, but yields the raw messages, for copying records byte for byte."""
    consumer = Consumer(
        consumer_config(settings, READERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": TO_END_WAIT_MS}
    )
    try:
        todo: dict[int, int] = {}
        assignment = []
        for p in _partitions(settings, consumer, topic):
            low, high = _watermarks(settings, consumer, topic, p)
            stop = high if end is None else min(high, end.get(p, 0))
            begin = max(low, (start or {}).get(p, low))
            if begin < stop:
                todo[p] = stop
                assignment.append(TopicPartition(topic, p, begin))
        if not todo:
            return
        consumer.assign(assignment)
        heard = time.monotonic()
        while todo:
            for message in _messages(consumer, 500, 0.2):
                heard = time.monotonic()
                error, p = message.error(), int(message.partition())
                if error is not None:
                    # The end of the partition may come before `stop`: transaction markers have offsets too.
                    if error.code() == KafkaError._PARTITION_EOF:
                        todo.pop(p, None)
                        continue
                    raise refused(settings, error, Operation.READ, topic, READERS)
                if p not in todo:
                    continue
                if message.offset() < todo[p]:
                    yield message
                if message.offset() + 1 >= todo[p]:
                    del todo[p]
            if time.monotonic() - heard > timeout:
                raise TimeoutError(f"no record from {topic} partitions {sorted(todo)} for {timeout:g} s")
    finally:
        consumer.close()


def _messages(consumer: Consumer, most: int, timeout: float) -> list[Message]:
    """Returns what is there, errors and ends of partitions included; if there is nothing, waits for the first. To ask
    for many at once would wait the whole time whenever fewer come."""
    first = consumer.poll(timeout)
    return [] if first is None else [first, *consumer.consume(most - 1, 0.0)]


Lags = dict[tuple[str, ...], float]
"""The records behind, per topic and partition."""


def _lag(consumer: Consumer) -> Lags:
    """Returns the records between the last one read and the end of each partition, as of its last fetch.

    Asks the client alone, not the broker. Partitions of which nothing was fetched yet are left out.
    """
    found: Lags = {}
    for place in consumer.position(consumer.assignment()):
        if (behind := records_behind(consumer, place)) is not None:
            found[str(place.topic), str(place.partition)] = float(behind)
    return found


def records_behind(consumer: Consumer, position: TopicPartition) -> int | None:
    """Returns the records between a position and the end of its partition, as of the last fetch; None if the position
    is none yet, or nothing was fetched. Asks the client alone, not the broker."""
    end = _fetched_end(consumer, position)
    return None if position.offset < 0 or end is None else max(0, end - position.offset)


def _fetched_end(consumer: Consumer, place: TopicPartition) -> int | None:
    """Returns the end of a partition as of its last fetch; None before the first."""
    _, end = consumer.get_watermark_offsets(place, cached=True)
    return end if end >= 0 else None


class Follower:
    """Reads all partitions of topics from the beginning, or from `start` per (topic, partition), and continues with new
    records. It uses no consumer group: for the small compacted topics, and for commands that watch.

    `poll` returns new records; `caught_up` is true once each partition has been read to the end that it had when its
    first record came. One consumer reads all topics, so their records arrive nearly in the order in which they were
    appended.

    `wait_ms`: how long the broker holds a fetch that finds nothing. That delays no record, only `caught_up`, for a
    partition that is empty or ends with a transaction's marker. Each fetch in a second costs broker and client about
    0.2 % of a core.
    """

    def __init__(
        self,
        settings: Settings,
        *topic_names: str,
        start: Mapping[tuple[str, int], int] | None = None,
        wait_ms: int = IDLE_WAIT_MS,
    ) -> None:
        self._settings = settings
        self._consumer = Consumer(
            consumer_config(settings, FOLLOWERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": wait_ms}
        )
        places = [(topic, p) for topic in topic_names for p in _partitions(settings, self._consumer, topic)]
        begin = start or {}
        self._consumer.assign([TopicPartition(*place, begin.get(place, OFFSET_BEGINNING)) for place in places])
        self._pending: dict[tuple[str, int], int | None] = dict.fromkeys(places)
        """The partitions that were not yet read to their end, each with that end, None before its first record."""

    @property
    def caught_up(self) -> bool:
        return not self._pending

    def poll(self, timeout: float) -> list[Stored]:
        """The records that are there; if there are none, waits up to `timeout` seconds for the first.

        Raises Forbidden, Unreachable, and KafkaException for errors that are not transient.
        """
        found = []
        for message in _messages(self._consumer, 500, timeout):
            error = message.error()
            if error is None:
                found.append(Stored.of(message))
                self._note(found[-1])
            elif error.code() == KafkaError._PARTITION_EOF:
                self._pending.pop((str(message.topic()), int(message.partition())), None)
            elif not passes(error):
                raise refused(self._settings, error, Operation.READ, str(message.topic()), FOLLOWERS)
        return found

    def _note(self, stored: Stored) -> None:
        """Notes that a partition is read up to a record. The client tells the end of a partition only when a fetch
        finds nothing new, which for a partition that is written all the time is never."""
        place = (stored.topic, stored.partition)
        if place not in self._pending:
            return
        end = self._pending[place]
        if end is None:
            end = self._pending[place] = _fetched_end(self._consumer, TopicPartition(*place))
        if end is not None and end <= stored.offset + 1:
            del self._pending[place]

    def lag(self) -> Lags:
        """The records behind. Call it on the thread that polls."""
        return _lag(self._consumer)

    def close(self) -> None:
        """Closes the consumer."""
        self._consumer.close()


class GroupConsumer:
    """A member of a consumer group that commits explicitly, after the work is done."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        topic_names: Iterable[str],
        *,
        instance: str | None = None,
        on_assign: Callable[[list[TopicPartition]], None] | None = None,
        on_revoke: Callable[[list[TopicPartition]], None] | None = None,
        on_loss: Callable[[list[PartitionLoss]], None] | None = None,
    ) -> None:
        """`on_loss` hears, when partitions are assigned, of records that were removed unread and of logs that end
        before the committed offset; the member then reads from the beginning of the log. If that happens to a partition
        that it owns, `poll` raises KafkaException. Without `on_loss`, it always goes on at the beginning, silently."""
        self._settings, self._group = settings, group
        self._on_assign, self._on_loss, self._closing = on_assign, on_loss, False
        config = consumer_config(settings, group, instance=instance)
        self._consumer = Consumer(config if on_loss is None else config | {"auto.offset.reset": "error"})
        callbacks: dict[str, Any] = {"on_assign": self._assigned}
        if on_revoke is not None:
            callbacks["on_revoke"] = lambda _, partitions: on_revoke(partitions)
        self._consumer.subscribe(list(topic_names), **callbacks)

    def poll(self, timeout: float, most: int = 500) -> list[Stored]:
        """The records that are there, at most `most`; if there are none, waits up to `timeout` seconds for the first.

        Raises Forbidden, Unreachable, and KafkaException for errors that are not transient.
        """
        found = []
        for message in _messages(self._consumer, most, timeout):
            error = message.error()
            if error is None:
                found.append(Stored.of(message))
            elif not passes(error):
                raise refused(self._settings, error, Operation.READ, str(message.topic()), self._group)
        return found

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._closing:  # the client answers nothing any more
            return
        if self._on_loss is not None:
            # The committed offsets come before the ends of the logs, which others move.
            committed = asked_again(lambda: consumer.committed(partitions, timeout=TIMEOUT_S))
            losses = _losses(self._settings, [each for each in committed if each.offset >= 0])
            if losses:
                self._on_loss(losses)
            lost = {(loss.topic, loss.partition) for loss in losses}
            for each in committed:
                if each.offset < 0 or (each.topic, each.partition) in lost:
                    each.offset = OFFSET_BEGINNING
            consumer.assign(committed)
        if self._on_assign is not None:
            self._on_assign(partitions)

    def lag(self) -> Lags:
        """The records behind, of the partitions that it owns. Call it on the thread that polls."""
        return _lag(self._consumer)

    def commit(self, done: Iterable[Stored], timeout_attempts: int = 5) -> None:
        """Commits the offsets after these records. A commit that a rebalance overtook is dropped: the records are
        delivered again.
        """
        ends: dict[tuple[str, int], int] = {}
        for stored in done:
            place = (stored.topic, stored.partition)
            ends[place] = max(ends.get(place, 0), stored.offset + 1)
        offsets = [TopicPartition(topic, p, offset) for (topic, p), offset in ends.items()]
        if not offsets:
            return
        for attempt in range(timeout_attempts):
            try:
                self._consumer.commit(offsets=offsets, asynchronous=False)
                return
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                overtaken = {
                    KafkaError.ILLEGAL_GENERATION,
                    KafkaError.UNKNOWN_MEMBER_ID,
                    KafkaError.REBALANCE_IN_PROGRESS,
                }
                if reason.code() in overtaken:
                    log.warning("commit overtaken by a rebalance, its records are delivered again: %s", reason.str())
                    return
                if attempt + 1 == timeout_attempts:
                    raise
                time.sleep(0.5 * 2**attempt)

    def close(self) -> None:
        """Leaves the group."""
        self._closing = True
        self._consumer.close()


def _losses(settings: Settings, positions: list[TopicPartition]) -> list[PartitionLoss]:
    """Compares committed offsets with the logs on the broker."""
    client = TopicClient(settings)
    ranges = client.ranges((each.topic, each.partition) for each in positions)
    identities = client.identities({each.topic for each in positions})
    return [
        loss
        for each in positions
        for loss in partition_losses(
            each.partition,
            [each.topic],
            None,
            PartitionRecord({each.topic: CommittedOffset(each.offset)}),
            identities,
            ranges,
        )
    ]
