"""The log as the bridge sees it: facts of the records that people ask for, the state of training, and live events."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.codec import Codec, DecodeError, SchemasUnavailable
from schemas.place import Place
from schemas.records import Feedback, Record, Result, Task
from tentalis import tracing
from tentalis.acls import FOLLOWERS, Operation
from tentalis.config import Settings
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.bridge.groups import Groups
from tentalis.gateway.bridge.mapping import same
from tentalis.gateway.bridge.ports import Found
from tentalis.gateway.bridge.reread import Reread
from tentalis.gateway.eventlog import EventLog, NotDelivered
from tentalis.gateway.failure import Refused
from tentalis.kafka import NoSuchTopic, RecordTooLarge, consumer_config, headers_in, make_codec, now_ms, passes
from tentalis.refusal import refused

log = logging.getLogger(__name__)

FACTS = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.SESSIONS, topics.OUTCOMES)
# Plans are long, and of the old ones nobody asks: this many records of their topic are read when it begins.
NEWEST_BATCHES = 512
EVENT_ID = "ce_id"
PAUSE_S = 2.0
TIMEOUT_S = 10.0
ACKNOWLEDGED_S = 10.0


class KafkaLog:
    """The log of a broker. `horizon_ms`, `most_facts`: how far back it is read when it begins."""

    def __init__(self, settings: Settings, events: EventLog, *, horizon_ms: int, most_facts: int) -> None:
        self._events = events
        self._reread = Reread(settings, make_codec(settings, patience=0.0))
        self._groups = Groups(settings)
        since, most = now_ms() - horizon_ms, most_facts // len(FACTS)
        # On a thread of its own, with a codec of its own.
        self._following = Following(settings, make_codec(settings), since_ms=since, most=most)
        self._sending: dict[tuple[str, str], tuple[Record, asyncio.Future[Place]]] = {}
        self.start = self._following.start
        self.records = self._reread.records
        self.groups = self._groups.look

    @property
    def trouble(self) -> str | None:
        """Why what was found of it may be old, None if it is not."""
        return self._events.fatal or self._following.trouble

    async def append(self, topic: str, record: Record) -> Fact:
        """Where a record lies, once the broker has acknowledged it.

        Raises Refused: 413 for a record over the limit, 503 where the broker does not acknowledge in time. Then it may
        come to the log or not; who sends it again meanwhile waits for the same record.
        """
        name = (topic, record.event_id)
        if name not in self._sending:
            self._sending[name] = record, self._sent(topic, record)
            self._sending[name][1].add_done_callback(lambda _sent: self._sending.pop(name, None))
        before, sent = self._sending[name]
        if not same(before, record):
            raise Refused(409, f"the id {record.event_id} is being written for something else")
        try:
            place = await asyncio.wait_for(asyncio.shield(sent), ACKNOWLEDGED_S)
        except (NotDelivered, TimeoutError) as error:
            why = str(error) or f"nothing for {ACKNOWLEDGED_S:g} s"
            raise Refused(
                503, f"the log does not acknowledge it ({why}): send the same again", "api_error", retry_after_s=2
            ) from error
        return Fact(topic, place.partition, place.offset, now_ms(), record.event_id)

    def _sent(self, topic: str, record: Record) -> asyncio.Future[Place]:
        try:
            return self._events.sent(self._events.prepared(topic, record, _trace(record)))
        except RecordTooLarge as error:
            raise Refused(413, str(error)) from error
        except (NotDelivered, SchemasUnavailable) as error:
            raise Refused(503, f"the log does not take it: {error}", "api_error", retry_after_s=2) from error

    def close(self) -> None:
        """Ends. What was sent is the event log's to finish."""
        self._following.close()
        self._reread.close()
        self._groups.close()


def _trace(record: Record) -> str | None:
    """The trace that a record belongs to: that of its task."""
    if isinstance(record, Task):
        with tracing.span("task", root=record.task_id, producer=True, task_id=record.task_id) as span:
            return span.traceparent
    return tracing.derived(record.key) if isinstance(record, Result | Feedback) else None


class Following:
    """A thread with one consumer in no group.

    Args:
        since_ms: append time from which facts are read when it begins.
        most: records of facts' topics, per topic, that are read then at most.
    """

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        *,
        since_ms: int,
        most: int,
    ) -> None:
        self._settings, self._codec = settings, codec
        self._since_ms, self._most = since_ms, most
        self._next: dict[tuple[str, int], int] = {}
        self._behind: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._take: Callable[[Found], None]
        self._wanted: Callable[[], bool]
        self._thread = threading.Thread(target=self._run, name="bridge-log", daemon=True)
        self.trouble: str | None = "the log is not read yet"
        """Why what it found may be old, None if it is not."""

    def start(self, take: Callable[[Found], None], wanted: Callable[[], bool]) -> None:
        """Begins, on the running event loop."""
        self._take, self._wanted, self._loop = take, wanted, asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Ends; blocks for a moment. Not to be called on the event loop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except Exception as error:  # noqa: BLE001 - told on /health and tried again: the broker may come back
                self.trouble = f"the log cannot be read: {error}"
                log.warning("%s; again in %g s", self.trouble, PAUSE_S)
                self._stop.wait(PAUSE_S)

    def _follow(self) -> None:
        lost: list[KafkaError] = []

        def told(error: KafkaError) -> None:
            # No message and no return value of poll says so.
            if error.code() == KafkaError._ALL_BROKERS_DOWN:
                lost.append(error)

        config = consumer_config(self._settings, FOLLOWERS)
        consumer = Consumer(config | {"enable.partition.eof": True, "fetch.wait.max.ms": 100, "error_cb": told})
        try:
            places = [place for name in FACTS for place in self._begin(consumer, name, since_ms=self._since_ms)]
            for name in (topics.RUNS, topics.POLICIES, topics.POLICY_ACKS):
                places += self._begin(consumer, name)
            places += self._begin(consumer, topics.BATCHES, newest=NEWEST_BATCHES)
            self._behind = {(place.topic, place.partition) for place in places}
            consumer.assign(places)
            while not self._stop.is_set():
                messages = []
                # To ask for 500 at once would wait for the whole 0.2 s wherever there are fewer.
                first = consumer.poll(0.2)
                for message in [] if first is None else [first, *consumer.consume(499, 0.0)]:
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        self._behind.discard((message.topic(), message.partition()))
                    elif not passes(error):
                        raise refused(self._settings, error, Operation.READ, str(message.topic()), FOLLOWERS)
                self._hand_over(messages)
                if lost:
                    raise KafkaException(lost[0])
                self.trouble = f"{len(self._behind)} partitions are not read to their end yet" if self._behind else None
        finally:
            consumer.close()

    def _begin(
        self, consumer: Consumer, topic: str, *, since_ms: int | None = None, newest: int | None = None
    ) -> Iterable[TopicPartition]:
        metadata = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic]
        if metadata.error is not None:
            raise NoSuchTopic(f"{topic}: {metadata.error.str()}. `tentalis topics apply` creates it")
        places = [TopicPartition(topic, p, since_ms or 0) for p in sorted(metadata.partitions)]
        if since_ms is not None:
            # -1, the end, where nothing is that young.
            places = consumer.offsets_for_times(places, timeout=TIMEOUT_S)
            newest = self._most // len(places)
        for place in places:
            low, high = consumer.get_watermark_offsets(place, timeout=TIMEOUT_S)
            begin = high if place.offset < 0 else max(low, place.offset)
            known = self._next.get((topic, place.partition))
            place.offset = known if known is not None else max(begin, high - (newest or high))
        return places

    def _hand_over(self, messages: list[Message]) -> None:
        found = Found()
        decoding = self._wanted()
        behind: dict[tuple[str, int], int] = {}
        for message in messages:
            topic, partition, offset = str(message.topic()), int(message.partition()), int(message.offset())
            behind[topic, partition] = offset + 1
            value = message.value()
            if value is None:
                continue
            event_id = next((v for name, v in headers_in(message) if name == EVENT_ID), None) or b""
            fact = Fact(topic, partition, offset, int(message.timestamp()[1]), event_id.decode("utf-8", "replace"))
            if topic in FACTS:
                found.facts.append((fact, message.key() or b""))
            if topic not in FACTS or decoding:
                try:
                    expected = topics.table().records_of(topic)
                    record = self._codec.decode(
                        value, topic=topic, partition=partition, offset=offset, expected=expected
                    )
                except DecodeError as error:
                    log.debug("passed over, its owner dead-letters it: %s", error)
                else:
                    found.records.append((fact, record))
        if messages:
            # One look at a time: the event loop has other work between them.
            done = threading.Event()
            self._loop.call_soon_threadsafe(self._taken, found, done)
            # Only now: where the schemas are away, nothing of these was handed over, and all of them are read again.
            self._next |= behind
            while not done.wait(0.2) and not self._stop.is_set():
                pass

    def _taken(self, found: Found, done: threading.Event) -> None:
        try:
            self._take(found)
        finally:
            done.set()
