"""Writes records to Kafka from an event loop; each append returns once the broker has the record."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.place import RecordPlace
from schemas.records import Record
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.gateway.recording.spool import SpooledRecord
from tentalis.kafka.config import producer_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import unconfirmed
from tentalis.kafka.offsets import end_offsets, offsets_at
from tentalis.kafka.producer import checked_size, headers_of, hear_reports
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

# Tolerated difference between the clocks of two machines, or of one machine before and after a restart.
CLOCK_SLACK_MS = 120_000


# The record types that a gateway writes.
RECORD_TYPES = ("SessionEvent", "Task", "Result", "Feedback")
_SCHEMA_RETRY_S = 1.0


class AppendFailed(Exception):
    """The broker did not take a record, or its delivery is unknown."""


class EventLog:
    """An acknowledged producer (acks=all, idempotent). One per process; `append` on any event loop's thread.

    `source`: the writer's name in the record headers. `codec`: not shared, and with patience 0. A schema registry is
    asked on a separate thread: it may be slow, and the event loop has other calls to serve.
    """

    def __init__(self, settings: Settings, source: str, codec: Codec) -> None:
        self._settings, self._codec, self._source = settings, codec, source
        self.fatal_error: str | None = None
        # Each caller waits for the acknowledgement: lingering would only add latency.
        self._producer = Producer(producer_config(settings) | {"linger.ms": 0, "error_cb": self._on_error})
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=hear_reports, args=(self._producer, self._stop, self._on_error), name="event-log", daemon=True
        )
        self._thread.start()
        self._prepare_schemas()

    def _prepare_schemas(self) -> None:
        """Asks the registry, on a thread, for the ids of all written schemas until it has given them."""

        def prepare() -> None:
            remaining, warned = list(RECORD_TYPES), False
            while remaining and not self._stop.is_set():
                try:
                    self._codec.prepare(remaining[0])
                    del remaining[0]
                except SchemasUnavailable as error:
                    if not warned:
                        log.warning("%s; retrying every %g s", error, _SCHEMA_RETRY_S)
                    warned = True
                    self._stop.wait(_SCHEMA_RETRY_S)

        if not all(map(self._codec.ready, RECORD_TYPES)):
            threading.Thread(target=prepare, name="event-log-schemas", daemon=True).start()

    def encode(self, topic: str, record: Record, traceparent: str | None = None) -> SpooledRecord:
        """Encodes a record for the log. Raises RecordTooLarge, and SchemasUnavailable while its schema's id is
        unknown."""
        if not self._codec.ready(type(record).__name__):
            raise SchemasUnavailable("the schema registry has not returned the schema ids yet: is it running?")
        return self._spooled_record(topic, record, self._codec.encode(topic, record), traceparent)

    def encode_for_disk(self, topic: str, record: Record) -> SpooledRecord:
        """Encodes a record for disk while its schema's id is unknown; `finalise` completes it. Raises
        RecordTooLarge."""
        return self._spooled_record(topic, record, self._codec.encode_single(record), None)

    def finalise(self, record: SpooledRecord) -> SpooledRecord:
        """Completes a record of `encode_for_disk` for the log; returns any other record unchanged. Blocking.

        Raises SchemasUnavailable, and LookupError for a record that can never be decoded.
        """
        return replace(record, value=self._codec.reframed(record.value))

    def _spooled_record(self, topic: str, record: Record, value: bytes, traceparent: str | None) -> SpooledRecord:
        headers = tuple(headers_of(record, self._source, traceparent))
        checked = checked_size(topic, record.key, value)
        return SpooledRecord(record.event_id, topic, record.key.encode(), checked, headers, now_ms())

    def send(self, record: SpooledRecord, on_done: Callable[[KafkaError | RecordPlace], None]) -> None:
        """Queues a record; `on_done` is called on the poll thread with the record's place, or with the delivery error.

        Raises AppendFailed while the local queue is full.
        """

        def delivered(error: KafkaError | None, message: Message) -> None:
            delivery_error = unconfirmed(error, message)
            on_done(
                RecordPlace(record.topic, int(message.partition()), int(message.offset()))
                if delivery_error is None
                else delivery_error
            )

        try:
            self._producer.produce(
                record.topic, record.value, record.key, headers=list(record.headers), on_delivery=delivered
            )
        except BufferError as error:
            raise AppendFailed("the producer's queue is full") from error
        except KafkaException as error:
            raise AppendFailed(f"the record cannot be queued: {error.args[0].str()}") from error

    def send_async(self, record: SpooledRecord) -> "asyncio.Future[RecordPlace]":
        """Like `send`, for the running event loop: the future holds the record's place, or AppendFailed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RecordPlace] = loop.create_future()

        def settle(outcome: KafkaError | RecordPlace) -> None:
            if future.done():
                return
            if isinstance(outcome, RecordPlace):
                future.set_result(outcome)
            else:
                future.set_exception(AppendFailed(f"the broker did not take a record: {outcome.str()}"))
                future.exception()  # marks the exception as retrieved, if the caller no longer waits

        def on_done(outcome: KafkaError | RecordPlace) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        self.send(record, on_done)
        return future

    async def append(self, topic: str, record: Record, within_s: float = 10.0) -> None:
        """Returns once the broker has the record. Raises AppendFailed, RecordTooLarge, SchemasUnavailable."""
        try:
            await asyncio.wait_for(asyncio.shield(self.send_async(self.encode(topic, record))), within_s)
        except TimeoutError as error:
            raise AppendFailed(f"the broker did not confirm within {within_s:g} s: is it up?") from error

    def ids_on_log(self, topic: str, since: int, event_ids: Collection[str]) -> set[str]:
        """Returns those of these event ids that are on the log, by their header, from `since` (ms since the epoch) on.

        Blocking. Raises KafkaException, NoSuchTopic, TimeoutError while the log cannot be read.
        """
        start = _offsets_at(self._settings, topic, since - CLOCK_SLACK_MS)
        found = set()
        for stored in read_to_end(self._settings, topic, start=start):
            for name, value in stored.headers:
                if name == "ce_id" and (event_id := value.decode("utf-8", "replace")) in event_ids:
                    found.add(event_id)
        return found

    def close(self, timeout: float = 2.0) -> None:
        """Waits briefly for records in flight, and stops."""
        self._producer.flush(timeout)
        self._stop.set()
        self._thread.join(timeout)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal() and self.fatal_error is None:
            self.fatal_error = error.str()
            log.error("the producer has failed permanently: %s", error.str())


def _offsets_at(settings: Settings, topic: str, since: int) -> dict[int, int]:
    """The first offset of each partition at or after `since` (ms); its end if there is none."""
    ends, found = end_offsets(settings, topic), offsets_at(settings, topic, since)
    return {p: end if (at := found.get(p)) is None else at for p, end in ends.items()}
