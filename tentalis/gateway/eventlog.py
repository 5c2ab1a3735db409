"""Records to Kafka from an event loop: each append tells when the broker has it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from schemas.codec import Codec, SchemasUnavailable
from schemas.place import Place
from schemas.records import Record
from tentalis.acls import READERS
from tentalis.config import Settings
from tentalis.gateway.spool import Spooled
from tentalis.kafka import (
    checked_size,
    consumer_config,
    end_offsets,
    headers_of,
    hear_reports,
    now_ms,
    producer_config,
    read_to_end,
    unconfirmed,
)

log = logging.getLogger(__name__)

# How far the clocks of two machines, or of one before and after a restart, may be apart.
CLOCK_SLACK_MS = 120_000


# What a gateway writes.
RECORDS = ("SessionEvent", "Task", "Result", "Feedback")
_ASK_AGAIN_S = 1.0


class NotDelivered(Exception):
    """The broker did not take a record, or it is not known whether it did."""


class EventLog:
    """An acknowledged producer (acks=all, idempotent). One per process; `append` on any event loop's thread.

    `source`: who writes, for the records' headers. `codec`: of its own, without patience. Where there is a schema
    registry, it is asked on a thread: it may be slow, and whoever writes has other calls on the same event loop.
    """

    def __init__(self, settings: Settings, source: str, codec: Codec) -> None:
        self._settings, self._codec, self._source = settings, codec, source
        self.fatal: str | None = None
        # Whoever appends waits for the answer: there is nothing to linger for.
        self._producer = Producer(producer_config(settings) | {"linger.ms": 0, "error_cb": self._erred})
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=hear_reports, args=(self._producer, self._stop, self._erred), name="event-log", daemon=True
        )
        self._thread.start()
        self._ask_schemas()

    def _ask_schemas(self) -> None:
        """Has the registry asked for all that is written, until it has told."""

        def ask() -> None:
            left, told = list(RECORDS), False
            while left and not self._stop.is_set():
                try:
                    self._codec.prepare(left[0])
                    del left[0]
                except SchemasUnavailable as error:
                    if not told:
                        log.warning("%s; asked again every %g s", error, _ASK_AGAIN_S)
                    told = True
                    self._stop.wait(_ASK_AGAIN_S)

        if not all(map(self._codec.ready, RECORDS)):
            threading.Thread(target=ask, name="event-log-schemas", daemon=True).start()

    def prepared(self, topic: str, record: Record, traceparent: str | None = None) -> Spooled:
        """The record as it goes to the log. Raises RecordTooLarge, and SchemasUnavailable as long as its schema's id is
        not known."""
        if not self._codec.ready(type(record).__name__):
            raise SchemasUnavailable("the schema registry has not told the ids of our schemas yet (is it up?)")
        return self._spooled(topic, record, self._codec.encode(topic, record), traceparent)

    def set_down(self, topic: str, record: Record) -> Spooled:
        """The record as it can be kept while its schema's id is not known; `final` makes the rest. Raises
        RecordTooLarge."""
        return self._spooled(topic, record, self._codec.encode_single(record), None)

    def final(self, record: Spooled) -> Spooled:
        """The record as it goes to the log, of one that was set down; any other as it is. Blocking.

        Raises SchemasUnavailable, and LookupError for one that nobody will ever be able to read.
        """
        return replace(record, value=self._codec.reframed(record.value))

    def _spooled(self, topic: str, record: Record, value: bytes, traceparent: str | None) -> Spooled:
        headers = tuple(headers_of(record, self._source, traceparent))
        checked = checked_size(topic, record.key, value)
        return Spooled(record.event_id, topic, record.key.encode(), checked, headers, now_ms())

    def send(self, record: Spooled, done: Callable[[KafkaError | Place], None]) -> None:
        """Queues a record; `done` is called on the poll thread with where it lies, or why the broker does not have it.

        Raises NotDelivered while the local queue is full.
        """

        def delivered(error: KafkaError | None, message: Message) -> None:
            why = unconfirmed(error, message)
            done(Place(record.topic, int(message.partition()), int(message.offset())) if why is None else why)

        try:
            self._producer.produce(
                record.topic, record.value, record.key, headers=list(record.headers), on_delivery=delivered
            )
        except BufferError as error:
            raise NotDelivered("the queue to the broker is full") from error
        except KafkaException as error:
            raise NotDelivered(f"the broker is not asked: {error.args[0].str()}") from error

    def sent(self, record: Spooled) -> "asyncio.Future[Place]":
        """As `send`, for the running event loop: where it lies, once the broker has it, or NotDelivered."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Place] = loop.create_future()

        def settle(became: KafkaError | Place) -> None:
            if future.done():
                return
            if isinstance(became, Place):
                future.set_result(became)
            else:
                future.set_exception(NotDelivered(f"the broker did not take a record: {became.str()}"))
                future.exception()  # whoever stopped waiting has heard enough

        def done(became: KafkaError | Place) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, became)

        self.send(record, done)
        return future

    async def append(self, topic: str, record: Record, within_s: float = 10.0) -> None:
        """Returns once the broker has the record. Raises NotDelivered, RecordTooLarge, SchemasUnavailable."""
        try:
            await asyncio.wait_for(asyncio.shield(self.sent(self.prepared(topic, record))), within_s)
        except TimeoutError as error:
            raise NotDelivered(f"the broker did not confirm within {within_s:g} s: is it up?") from error

    def present(self, topic: str, since: int, wanted: Collection[str]) -> set[str]:
        """Which of these event ids lie on the log, by their header, from `since` (ms since the epoch) on.

        Blocking. Raises KafkaException, NoSuchTopic, TimeoutError while the log cannot be read.
        """
        start = _offsets_at(self._settings, topic, since - CLOCK_SLACK_MS)
        found = set()
        for stored in read_to_end(self._settings, topic, start=start):
            for name, value in stored.headers:
                if name == "ce_id" and (event_id := value.decode("utf-8", "replace")) in wanted:
                    found.add(event_id)
        return found

    def close(self, timeout: float = 2.0) -> None:
        """Waits a little for what is under way."""
        self._producer.flush(timeout)
        self._stop.set()
        self._thread.join(timeout)

    def _erred(self, error: KafkaError) -> None:
        if error.fatal() and self.fatal is None:
            self.fatal = error.str()
            log.error("the producer cannot go on: %s", error.str())


def _offsets_at(settings: Settings, topic: str, since: int) -> dict[int, int]:
    """Per partition the first offset that is not older."""
    ends = end_offsets(settings, topic)
    consumer = Consumer(consumer_config(settings, READERS))
    try:
        asked = [TopicPartition(topic, p, max(0, since)) for p in ends]
        found = consumer.offsets_for_times(asked, timeout=15)
        return {t.partition: t.offset if t.offset >= 0 else ends[t.partition] for t in found}
    finally:
        consumer.close()
