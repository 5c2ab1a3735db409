"""The bridge's access to Kafka: offsets of the records that clients ask for, training state, and live events."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Feedback, Record, Result, Task
from schemas.wire.codec import Codec, DecodeError, SchemasUnavailable
from tentalis.gateway.api.groups import ConsumerGroupView
from tentalis.gateway.api.mapping import same_content
from tentalis.gateway.api.offset_index import IndexedRecord
from tentalis.gateway.api.record_log import LogBatch
from tentalis.gateway.api.reread import Reread
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.recording.event_log import AppendFailed, EventLog
from tentalis.kafka.acls import FOLLOWERS, Operation
from tentalis.kafka.codec import make_codec
from tentalis.kafka.config import consumer_config
from tentalis.kafka.consumer import headers_in
from tentalis.kafka.errors import NoSuchTopic, RecordTooLarge, passes, refused
from tentalis.kafka.partitioner import TYPE_HEADER
from tentalis.kafka.topic_client import known_offset, offset_of_time
from tentalis.service import tracing
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

INDEXED_TOPICS = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.SESSIONS, topics.HALVES, topics.OUTCOMES)
"""Of the halves only the hints are indexed."""
# Number of newest batch plans read at the start: plans are long, and old ones are not needed.
NEWEST_BATCHES = 512
EVENT_ID_HEADER = "ce_id"
HINT_TYPE = b"tentalis.Hint"
RETRY_S = 2.0
TIMEOUT_S = 10.0
ACKNOWLEDGE_TIMEOUT_S = 10.0


class KafkaLog:
    """The log on a broker. `horizon_ms`, `max_records`: maximum age and number of the records read at the start."""

    def __init__(self, settings: Settings, event_log: EventLog, *, horizon_ms: int, max_records: int) -> None:
        self._event_log = event_log
        self._reread = Reread(settings, make_codec(settings, patience=0.0))
        self._groups = ConsumerGroupView(settings)
        since_ms, max_per_topic = now_ms() - horizon_ms, max_records // len(INDEXED_TOPICS)
        # On a separate thread, with a separate codec.
        self._follower = BridgeLogFollower(settings, make_codec(settings), since_ms=since_ms, max_records=max_per_topic)
        self._in_flight: dict[tuple[str, str], tuple[Record, asyncio.Future[RecordPlace]]] = {}
        self.start = self._follower.start
        self.records = self._reread.records
        self.consumer_groups = self._groups.latest

    @property
    def stale_reason(self) -> str | None:
        """The reason why the index may be stale, None if it is current."""
        return self._event_log.fatal_error or self._follower.stale_reason

    async def append(self, topic: str, record: Record) -> IndexedRecord:
        """Appends a record and returns its place once the broker has acknowledged it.

        Raises APIError: 413 for a record over the limit, 503 if the broker does not acknowledge in time. The record may
        then still reach the log; a retry meanwhile waits for the same record.
        """
        key = (topic, record.event_id)
        if key not in self._in_flight:
            self._in_flight[key] = record, self._send(topic, record)
            self._in_flight[key][1].add_done_callback(lambda _sent: self._in_flight.pop(key, None))
        pending, future = self._in_flight[key]
        if not same_content(pending, record):
            raise APIError(409, f"the id {record.event_id} is being written with other content")
        try:
            place = await asyncio.wait_for(asyncio.shield(future), ACKNOWLEDGE_TIMEOUT_S)
        except (AppendFailed, TimeoutError) as error:
            reason = str(error) or f"no acknowledgement within {ACKNOWLEDGE_TIMEOUT_S:g} s"
            raise APIError(
                503, f"the log did not acknowledge the record ({reason}): send it again", "api_error", retry_after_s=2
            ) from error
        return IndexedRecord(topic, place.partition, place.offset, now_ms(), record.event_id)

    def _send(self, topic: str, record: Record) -> asyncio.Future[RecordPlace]:
        try:
            return self._event_log.send_async(self._event_log.encode(topic, record, _trace(record)))
        except RecordTooLarge as error:
            raise APIError(413, str(error)) from error
        except (AppendFailed, SchemasUnavailable) as error:
            raise APIError(503, f"the log does not accept the record: {error}", "api_error", retry_after_s=2) from error

    def close(self) -> None:
        """Stops reading. The event log finishes records that were sent."""
        self._follower.close()
        self._reread.close()
        self._groups.close()


def _trace(record: Record) -> str | None:
    """The traceparent of a record's task."""
    if isinstance(record, Task):
        with tracing.span("task", root=record.task_id, producer=True, task_id=record.task_id) as span:
            return span.traceparent
    return tracing.derived(record.key) if isinstance(record, Result | Feedback) else None


class BridgeLogFollower:
    """A thread with one consumer outside any group.

    Args:
        since_ms: append time from which the indexed topics are read at the start.
        max_records: maximum number of records read at the start per indexed topic.
    """

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        *,
        since_ms: int,
        max_records: int,
    ) -> None:
        self._settings, self._codec = settings, codec
        self._since_ms, self._max_records = since_ms, max_records
        self._next_offsets: dict[tuple[str, int], int] = {}
        self._unread: dict[tuple[str, int], int] = {}
        """The end that each partition had at the start, for those that were not yet read to it."""
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._on_batch: Callable[[LogBatch], None]
        self._decode_all: Callable[[], bool]
        self._thread = threading.Thread(target=self._run, name="bridge-log", daemon=True)
        self.stale_reason: str | None = "the log has not been read yet"
        """The reason why the index may be stale, None if it is current."""

    def start(self, on_batch: Callable[[LogBatch], None], decode_all: Callable[[], bool]) -> None:
        """Starts the thread; `on_batch` and `decode_all` serve the running event loop."""
        self._on_batch, self._decode_all, self._loop = on_batch, decode_all, asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stops the thread. Blocks briefly, so do not call it on the event loop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except Exception as error:  # noqa: BLE001 - reported on /health and retried: the broker may come back
                self.stale_reason = f"the log cannot be read: {error}"
                log.warning("%s; retrying in %g s", self.stale_reason, RETRY_S)
                self._stop.wait(RETRY_S)

    def _follow(self) -> None:
        broker_errors: list[KafkaError] = []

        def on_error(error: KafkaError) -> None:
            # Only this callback reports it: poll returns neither a message nor an error.
            if error.code() == KafkaError._ALL_BROKERS_DOWN:
                broker_errors.append(error)

        config = consumer_config(self._settings, FOLLOWERS)
        consumer = Consumer(config | {"enable.partition.eof": True, "fetch.wait.max.ms": 100, "error_cb": on_error})
        try:
            self._unread = {}
            positions = [
                position
                for topic in INDEXED_TOPICS
                for position in self._start_positions(consumer, topic, since_ms=self._since_ms)
            ]
            for topic in (topics.RUNS, topics.POLICIES, topics.POLICY_ACKS):
                positions += self._start_positions(consumer, topic)
            positions += self._start_positions(consumer, topics.BATCHES, max_newest=NEWEST_BATCHES)
            consumer.assign(positions)
            while not self._stop.is_set():
                messages = []
                # Consuming 500 at once would wait the whole 0.2 s if there are fewer.
                first = consumer.poll(0.2)
                for message in [] if first is None else [first, *consumer.consume(499, 0.0)]:
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        self._unread.pop((str(message.topic()), int(message.partition())), None)
                    elif not passes(error):
                        raise refused(self._settings, error, Operation.READ, str(message.topic()), FOLLOWERS)
                self._deliver(messages)
                if broker_errors:
                    raise KafkaException(broker_errors[0])
                self.stale_reason = f"{len(self._unread)} partitions are not fully read yet" if self._unread else None
        finally:
            consumer.close()

    def _start_positions(
        self, consumer: Consumer, topic: str, *, since_ms: int | None = None, max_newest: int | None = None
    ) -> Iterable[TopicPartition]:
        metadata = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic]
        if metadata.error is not None:
            raise NoSuchTopic(f"{topic}: {metadata.error.str()}. `tentalis topics apply` creates it")
        positions = [TopicPartition(topic, p, since_ms or 0) for p in sorted(metadata.partitions)]
        # Before the times: what is appended in between comes after these ends and is read.
        ranges = [consumer.get_watermark_offsets(position, timeout=TIMEOUT_S) for position in positions]
        if since_ms is not None:
            # Gives -1, the end, if no record is that recent.
            positions = consumer.offsets_for_times(positions, timeout=TIMEOUT_S)
            max_newest = self._max_records // len(positions)
        for position, (low, high) in zip(positions, ranges, strict=True):
            known_offset(low), known_offset(high)
            if since_ms is not None:
                offset_of_time(position.offset)
            self._unread[topic, position.partition] = high
            first = high if position.offset < 0 else max(low, position.offset)
            next_offset = self._next_offsets.get((topic, position.partition))
            position.offset = next_offset if next_offset is not None else max(first, high - (max_newest or high))
        return positions

    def _deliver(self, messages: list[Message]) -> None:
        batch = LogBatch()
        decode_all = self._decode_all()
        next_offsets: dict[tuple[str, int], int] = {}
        for message in messages:
            topic, partition, offset = str(message.topic()), int(message.partition()), int(message.offset())
            next_offsets[topic, partition] = offset + 1
            value = message.value()
            if value is None:
                continue
            headers = dict(headers_in(message))
            # A record that has lost its headers may be a hint: its type is seen when it is read again.
            if topic == topics.HALVES and headers.get(TYPE_HEADER, HINT_TYPE) != HINT_TYPE:
                continue
            event_id = (headers.get(EVENT_ID_HEADER) or b"").decode("utf-8", "replace")
            ref = IndexedRecord(topic, partition, offset, int(message.timestamp()[1]), event_id)
            if topic in INDEXED_TOPICS:
                batch.refs.append((ref, message.key() or b""))
            if topic not in INDEXED_TOPICS or decode_all:
                try:
                    expected = topics.table().records_of(topic)
                    record = self._codec.decode(
                        value, topic=topic, partition=partition, offset=offset, expected=expected
                    )
                except DecodeError as error:
                    log.debug("skipped (the application that owns it dead-letters it): %s", error)
                else:
                    batch.records.append((ref, record))
        if messages:
            # One batch at a time, so that the event loop can do other work in between.
            taken = threading.Event()
            self._loop.call_soon_threadsafe(self._take_on_loop, batch, taken)
            # Only now: if the schema registry fails while decoding, nothing is handed over and all is read again.
            self._next_offsets |= next_offsets
            # The client tells the end only when a fetch finds nothing new: never where it is written all the time.
            reached = [place for place, end in self._unread.items() if next_offsets.get(place, -1) >= end]
            for place in reached:
                del self._unread[place]
            while not taken.wait(0.2) and not self._stop.is_set():
                pass

    def _take_on_loop(self, batch: LogBatch, taken: threading.Event) -> None:
        try:
            self._on_batch(batch)
        finally:
            taken.set()
