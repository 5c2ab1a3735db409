"""The one place that knows how Kafka clients are configured, and the few shapes in which this project uses them.

`Publisher` sends records and knows that they arrived; `read_to_end` reads what a topic holds now; `follow` reads on
and on without a consumer group; `GroupConsumer` shares partitions with its peers and commits when told.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from schemas import topics
from schemas.avro import AvroSchema
from schemas.codec import Codec, DecodeError, SchemasUnavailable
from schemas.place import Place
from schemas.records import Record
from tentalis.acls import FOLLOWERS, READERS, Operation
from tentalis.config import Settings
from tentalis.refusal import DENIED, LASTING, refused
from tentalis.security import librdkafka
from tentalis.tracing import TRACEPARENT

log = logging.getLogger(__name__)

TOPIC_PATIENCE_S = 5.0
REPORTS_S = 0.1
LAST_RFC3339_MS = 253_402_300_799_999  # the year 9999
# How long a process waits for a registry or broker that is asked for a schema, before it ends and says so.
SCHEMA_PATIENCE_S = 60.0
ELECTING = frozenset(
    {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART}
)
TRANSIENT = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE})


class RecordTooLarge(ValueError):
    """A record over the one size limit, refused where it is made."""


class DeliveryFailed(Exception):
    """The broker did not confirm a record."""


class NoSuchTopic(Exception):
    """A topic that the broker does not have."""


def client_config(settings: Settings) -> dict[str, Any]:
    """librdkafka's settings that every client shares: where the brokers are and how to authenticate.

    Holds the secrets: not for logs.
    """
    return {
        "bootstrap.servers": settings.require_bootstrap(),
        "allow.auto.create.topics": False,
        "socket.keepalive.enable": True,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "log_level": 3,
        "logger": logging.getLogger("librdkafka"),
        **librdkafka(settings.security),
    }


def producer_config(settings: Settings, *, transactional_id: str | None = None) -> dict[str, Any]:
    """Idempotent, acks=all, and murmur2: librdkafka's default CRC32 silently breaks co-partitioning with the JVM and
    aiokafka.
    """
    config = client_config(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "linger.ms": 5,
        "compression.type": "zstd",
        "delivery.timeout.ms": 120_000,
        "message.max.bytes": topics.table().record_limit_bytes + 2 * topics.OVERHEAD_BYTES,
        "queue.buffering.max.kbytes": 262_144,
    }
    if transactional_id is not None:
        config |= {"transactional.id": transactional_id, "transaction.timeout.ms": 60_000}
    return config


def consumer_config(settings: Settings, group: str, *, instance: str | None = None) -> dict[str, Any]:
    """Nothing is committed unless told; a missing offset is an error or the beginning, never a guess at the end."""
    limit = topics.table().record_limit_bytes
    config = client_config(settings) | {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "check.crcs": True,
        "enable.partition.eof": False,
        "session.timeout.ms": 10_000,
        "max.poll.interval.ms": 3_600_000,
        "fetch.message.max.bytes": limit + 2 * topics.OVERHEAD_BYTES,
        "fetch.max.bytes": 4 * limit,
        "queued.max.messages.kbytes": 131_072,
        "topic.metadata.refresh.interval.ms": 30_000,
    }
    return config | ({"group.instance.id": instance} if instance else {})


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it lies on the log. `raw_key` are the bytes that `key` was read from, which may be no UTF-8."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: str | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    raw_key: bytes | None = None

    @property
    def place(self) -> Place:
        return Place(self.topic, self.partition, self.offset)

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
        """The record of one of our topics. Raises DecodeError."""
        expected = topics.table().records_of(self.topic)
        return codec.decode(
            self.value, topic=self.topic, partition=self.partition, offset=self.offset, expected=expected
        )

    def decode_own(self, codec: Codec) -> Record:
        """As `decode`, of a record that lies under its own key: under another, compaction and partitions are wrong for
        it. Raises DecodeError."""
        record = self.decode(codec)
        if record.key != self.key:
            raise DecodeError(
                f"the Kafka key is {self.key!r}, but the record's own is {record.key!r}",
                topic=self.topic,
                partition=self.partition,
                offset=self.offset,
                schema=type(record).__name__,
                stage="validate",
            )
        return record


def headers_in(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    """The headers of a message; none, with a warning, where a name is no UTF-8: the client cannot read any of them
    then, and the record itself is none the worse for it.
    """
    try:
        return tuple(message.headers() or ())
    except (SystemError, UnicodeDecodeError):
        place = Place(message.topic(), message.partition(), message.offset())
        log.warning("%s has a header whose name is no UTF-8: its headers are left out", place)
        return ()


@lru_cache(1024)
def _rfc3339(ms: int) -> bytes:
    # Many records of a batch share their event time.
    return (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z").encode()


def headers_of(record: Record, source: str, traceparent: str | None = None) -> list[tuple[str, bytes]]:
    """CloudEvents headers (binary mode), and the trace. Id and time are in the body too: headers get lost. `ce_time` is
    left out for what RFC 3339 has no words for."""
    event_time = getattr(record, "event_time", 0)
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", record.event_id.encode()),
        ("ce_type", f"tentalis.{type(record).__name__}".encode()),
        ("ce_source", source.encode()),
        ("content-type", b"application/avro"),
    ]
    if 0 <= event_time <= LAST_RFC3339_MS:
        headers.append(("ce_time", _rfc3339(event_time)))
    if traceparent is not None:
        headers.append((TRACEPARENT, traceparent.encode()))
    return headers


def checked_size(topic: str, key: str, value: bytes) -> bytes:
    """The value, if a record may be that large. Raises RecordTooLarge with the limit in the message."""
    limit = topics.table().record_limit_bytes
    if len(value) > limit:
        raise RecordTooLarge(
            f"the record {key!r} for {topic} has {len(value):,} bytes; the limit is {limit:,} bytes "
            "(record_limit_bytes in schemas/topics.yaml). Shorten it, or raise the limit on broker and topics alike"
        )
    return value


def unconfirmed(error: KafkaError | None, message: Message) -> KafkaError | None:
    """Why a record that librdkafka reports on is not on the log, None if the broker said where it lies.

    Without an offset librdkafka only infers that it is there, because something behind it is. But of a producer that it
    does not know yet a broker writes the second request also where it refused the first (KAFKA-15591)."""
    if error is None and message.offset() is None:
        return KafkaError(KafkaError._INCONSISTENT, "the broker confirmed what was sent behind it, and not this")
    return error


def hear_reports(producer: Producer, over: threading.Event, fatal: Callable[[KafkaError], None]) -> None:
    """Waits for a producer's reports until it is `over`: the work of a thread.

    confluent-kafka raises a fatal error here, past `error_cb`: `fatal` hears of it, and the thread lives on, as the
    reports of what it failed come all the same, and say more.
    """
    while not over.is_set():
        try:
            producer.poll(REPORTS_S)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            fatal(error.args[0])
            over.wait(REPORTS_S)


class Publisher:
    """Sends records and knows that they arrived."""

    def __init__(self, settings: Settings, source: str, codec: Codec) -> None:
        self._settings = settings
        self._producer = Producer(producer_config(settings) | {"error_cb": self._erred})
        self._codec = codec
        self._source = source
        self._failed: tuple[KafkaError, str] | None = None
        self._shut_out: KafkaError | None = None

    def send(self, topic: str, record: Record, *, partition: int | None = None, traceparent: str | None = None) -> None:
        """Queues a record. Raises RecordTooLarge; delivery is known after `flush`."""
        value = checked_size(topic, record.key, self._codec.encode(topic, record))
        headers = headers_of(record, self._source, traceparent)
        self.send_bytes(topic, record.key.encode(), value, headers, partition=partition)

    def send_bytes(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Queues raw bytes; blocks while the local queue is full."""
        arguments: dict[str, Any] = {"headers": headers or [], "on_delivery": self._delivered}
        if partition is not None:
            arguments["partition"] = partition
        while True:
            try:
                self._producer.produce(topic, value, key, **arguments)
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        error = unconfirmed(error, message)
        if error is not None and self._failed is None:
            self._failed = error, str(message.topic())
            log.error("not delivered to %s: %s", message.topic(), error)

    def _erred(self, error: KafkaError) -> None:
        # librdkafka would go on trying until the delivery timeout.
        if error.code() in LASTING:
            self._shut_out = error

    def flush(self, timeout: float = 60.0) -> None:
        """Waits until everything sent is confirmed.

        Raises DeliveryFailed if anything was not, or not in time; Forbidden; Unreachable if no broker lets this process
        in.
        """
        deadline = time.monotonic() + timeout
        while (left := self._producer.flush(min(1.0, max(0.0, deadline - time.monotonic())))) and not self._shut_out:
            if time.monotonic() > deadline:
                break
        failed, self._failed = self._failed, None
        shut_out, self._shut_out = self._shut_out, None
        if failed is not None:
            error, topic = failed
            found = refused(self._settings, error, Operation.WRITE, topic)
            if isinstance(found, KafkaException):
                raise DeliveryFailed(f"the broker refused a record: {error.str()}")
            raise found
        if left and shut_out is not None:
            raise refused(self._settings, shut_out, Operation.WRITE, "")
        if left:
            raise DeliveryFailed(f"{left} records were not confirmed within {timeout:g} s: is the broker up?")


def passes(error: KafkaError) -> bool:
    """Whether what a consumer reports passes by itself: librdkafka reports a broker that is away as events and connects
    again, and a member that was away for too long joins its group again."""
    return bool(error.retriable()) or error.code() in TRANSIENT | {KafkaError._MAX_POLL_EXCEEDED}


def _partitions(settings: Settings, consumer: Consumer, topic: str) -> list[int]:
    deadline = time.monotonic() + TOPIC_PATIENCE_S
    while (metadata := consumer.list_topics(topic, timeout=15).topics[topic]).error is not None:
        # A broker that has just started does not know its topics at once.
        if metadata.error.code() in ELECTING and time.monotonic() < deadline:
            time.sleep(0.2)
            continue
        if metadata.error.code() in DENIED:
            raise refused(settings, metadata.error, Operation.READ, topic)
        raise NoSuchTopic(
            f"the broker has no topic {topic}: {metadata.error.str()}. `tentalis topics apply` creates it"
        )
    return sorted(metadata.partitions)


def _watermarks(
    settings: Settings, consumer: Consumer, topic: str, partition: int, patience: float = 30.0
) -> tuple[int, int]:
    """(first offset, offset after the last committed record). A broker that has just started may not lead the partition
    yet: errors that pass by themselves are waited out for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=15)
            return int(low), int(high)
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            if not (passes(reason) or reason.code() in ELECTING) or time.monotonic() > deadline:
                raise refused(settings, reason, Operation.DESCRIBE, topic) from error
            time.sleep(0.2)


def end_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """Per partition the offset after the last committed record. Raises NoSuchTopic."""
    consumer = Consumer(consumer_config(settings, READERS))
    try:
        return {p: _watermarks(settings, consumer, topic, p)[1] for p in _partitions(settings, consumer, topic)}
    finally:
        consumer.close()


def committed_offsets(settings: Settings, group: str, topic_names: Iterable[str]) -> dict[tuple[str, int], int]:
    """Per (topic, partition) the offset that a group has committed; partitions without one are left out.

    Through a consumer that never joins: librdkafka 2.16's AdminClient.list_consumer_group_offsets crashes the process
    while the group's coordinator is still loading. Raises NoSuchTopic, KafkaException.
    """
    consumer = Consumer(consumer_config(settings, group))
    try:
        places = [TopicPartition(name, p) for name in topic_names for p in _partitions(settings, consumer, name)]
        committed = consumer.committed(places, timeout=15)
        return {(str(place.topic), int(place.partition)): int(place.offset) for place in committed if place.offset >= 0}
    finally:
        consumer.close()


def read_to_end(
    settings: Settings,
    topic: str,
    *,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    timeout: float = 60.0,
) -> Iterator[Stored]:
    """Every record from `start` (default: the beginning) up to where the topic ends now (or `end`), partition order
    kept.

    No consumer group takes part. Raises NoSuchTopic, and TimeoutError if nothing arrives for `timeout` seconds.
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
    """As `read_to_end`, byte for byte: for whoever writes the records elsewhere."""
    consumer = Consumer(consumer_config(settings, READERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": 50})
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
            # To ask for 500 at once would wait for the whole 0.2 s wherever there are fewer.
            first = consumer.poll(0.2)
            for message in [] if first is None else [first, *consumer.consume(499, 0.0)]:
                heard = time.monotonic()
                error, p = message.error(), int(message.partition())
                if error is not None:
                    # At the end of the partition, perhaps before `stop`: transaction markers have offsets too.
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
                raise TimeoutError(f"nothing from {topic} partitions {sorted(todo)} for {timeout:g} s")
    finally:
        consumer.close()


class Follower:
    """Reads a topic from the start and on, all partitions, without a group: for the small compacted topics. Where it
    begins can be given per partition.

    `poll` returns what arrived; `caught_up` tells whether the end that the topic had at the start was reached.
    """

    def __init__(self, settings: Settings, topic: str, start: Mapping[int, int] | None = None) -> None:
        self._settings, self._topic = settings, topic
        self._consumer = Consumer(
            consumer_config(settings, FOLLOWERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": 100}
        )
        partitions = _partitions(settings, self._consumer, topic)
        begin = start or {}
        self._consumer.assign([TopicPartition(topic, p, begin.get(p, OFFSET_BEGINNING)) for p in partitions])
        self._pending = set(partitions)

    @property
    def caught_up(self) -> bool:
        return not self._pending

    def poll(self, timeout: float) -> list[Stored]:
        """What arrived within `timeout` seconds.

        Raises Forbidden, Unreachable, KafkaException for errors that do not pass by themselves.
        """
        found = []
        for message in self._consumer.consume(500, timeout):
            error = message.error()
            if error is None:
                found.append(Stored.of(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._pending.discard(int(message.partition()))
            elif not passes(error):
                raise refused(self._settings, error, Operation.READ, self._topic, FOLLOWERS)
        return found

    def close(self) -> None:
        """Leaves."""
        self._consumer.close()


class GroupConsumer:
    """A member of a consumer group that commits what it is told to, after the work is done."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        topic_names: Iterable[str],
        *,
        instance: str | None = None,
        on_assign: Callable[[list[TopicPartition]], None] | None = None,
        on_revoke: Callable[[list[TopicPartition]], None] | None = None,
    ) -> None:
        self._settings, self._group = settings, group
        self._consumer = Consumer(consumer_config(settings, group, instance=instance))
        callbacks: dict[str, Any] = {}
        if on_assign is not None:
            callbacks["on_assign"] = lambda _, partitions: on_assign(partitions)
        if on_revoke is not None:
            callbacks["on_revoke"] = lambda _, partitions: on_revoke(partitions)
        self._consumer.subscribe(list(topic_names), **callbacks)

    def poll(self, timeout: float, most: int = 500) -> list[Stored]:
        """What arrived within `timeout` seconds, at most `most` records.

        Raises Forbidden, Unreachable, KafkaException for errors that do not pass by themselves.
        """
        found = []
        for message in self._consumer.consume(most, timeout):
            error = message.error()
            if error is None:
                found.append(Stored.of(message))
            elif not passes(error):
                raise refused(self._settings, error, Operation.READ, str(message.topic()), self._group)
        return found

    def commit(self, done: Iterable[Stored], timeout_attempts: int = 5) -> None:
        """Commits the offsets after these records. A commit that a rebalance overtook is dropped: the records come
        again.
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
                    log.warning("commit overtaken by a rebalance, the records will come again: %s", reason.str())
                    return
                if attempt + 1 == timeout_attempts:
                    raise
                time.sleep(0.5 * 2**attempt)

    def close(self) -> None:
        """Leaves the group."""
        self._consumer.close()


class SchemaLookup:
    """Finds writer schemas on tentalis.schemas.v1 for a codec. For a new fingerprint the topic is read on from where it
    was read to: garbage has fingerprints too, each its own, and a schema may be published right after it was missed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._consumer: Consumer | None = None
        self._found: dict[bytes, AvroSchema] = {}
        self._next: dict[int, int] = {}

    def __call__(self, fingerprint: bytes) -> AvroSchema | None:
        """Raises SchemasUnavailable while the topic cannot be read, and Forbidden."""
        if fingerprint not in self._found:
            try:
                self._read_on()
            except (KafkaException, NoSuchTopic, TimeoutError) as error:
                raise SchemasUnavailable(f"schemas cannot be looked up on {topics.SCHEMAS}: {error}") from error
        return self._found.get(fingerprint)

    def _read_on(self) -> None:
        if self._consumer is None:
            consumer = Consumer(consumer_config(self._settings, READERS))
            self._next = dict.fromkeys(_partitions(self._settings, consumer, topics.SCHEMAS), 0)
            self._consumer = consumer
        ends = {p: _watermarks(self._settings, self._consumer, topics.SCHEMAS, p, patience=0.0)[1] for p in self._next}
        if ends == self._next:
            return
        for stored in read_to_end(self._settings, topics.SCHEMAS, start=self._next, end=ends):
            if stored.value is None:
                continue
            try:
                schema = AvroSchema.parse(stored.value.decode())
            except (ValueError, RecursionError) as error:
                log.warning("%s is passed over: %s", stored, error)
            else:
                self._found[schema.fingerprint] = schema
        self._next = ends


def make_codec(settings: Settings, *, patience: float = SCHEMA_PATIENCE_S) -> Codec:
    """The codec of a process: Confluent framing where SCHEMA_REGISTRY_URL is set, single-object encoding where not.

    `patience`: seconds for which it waits, blocking, for a registry or broker that is away; 0 where something else
    waits.
    """
    if settings.schema_registry:
        from schemas.registry import ConfluentRegistry

        login = settings.registry_login.client_config()
        return Codec(ConfluentRegistry(settings.schema_registry, login=login), SchemaLookup(settings), patience)
    return Codec(None, SchemaLookup(settings), patience)


def now_ms() -> int:
    """The wall clock, milliseconds since the epoch. For event times at the edge only; decisions read the log's own."""
    return time.time_ns() // 1_000_000
