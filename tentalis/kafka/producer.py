"""Sends records and confirms their delivery."""

import logging
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas import topics
from schemas.records import Record
from schemas.wire.codec import Codec
from tentalis.kafka.acls import Operation
from tentalis.kafka.config import producer_config
from tentalis.kafka.errors import LASTING, DeliveryFailed, RecordTooLarge, refused, unconfirmed
from tentalis.service.settings import Settings
from tentalis.service.tracing import TRACEPARENT

log = logging.getLogger(__name__)


REPORTS_S = 0.1
LAST_RFC3339_MS = 253_402_300_799_999  # the year 9999


@lru_cache(1024)
def _rfc3339(ms: int) -> bytes:
    # Many records of a batch share their event time.
    return (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z").encode()


def headers_of(record: Record, source: str, traceparent: str | None = None) -> list[tuple[str, bytes]]:
    """CloudEvents headers (binary mode) and the trace context. Id and time are in the body too, because headers get
    lost. `ce_time` is left out if RFC 3339 cannot express it."""
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
    """Returns the value if it is within the size limit. Raises RecordTooLarge, with the limit in the message."""
    limit = topics.table().record_limit_bytes
    if len(value) > limit:
        raise RecordTooLarge(
            f"the record {key!r} for {topic} has {len(value):,} bytes; the limit is {limit:,} bytes "
            "(record_limit_bytes in schemas/topics.yaml). Shorten it, or raise the limit on the broker and all topics"
        )
    return value


def hear_reports(producer: Producer, over: threading.Event, fatal: Callable[[KafkaError], None]) -> None:
    """Polls a producer's delivery reports until `over` is set: the body of a thread.

    confluent-kafka raises a fatal error here, not through `error_cb`. It is passed to `fatal`. The thread
    continues, because the reports of the failed records still arrive and are more specific.
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
    """Sends records and confirms their delivery."""

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
        # librdkafka would retry until the delivery timeout.
        if error.code() in LASTING:
            self._shut_out = error

    def flush(self, timeout: float = 60.0) -> None:
        """Waits until everything sent is confirmed.

        Raises DeliveryFailed if a record was rejected or not confirmed in time; Forbidden; Unreachable if no broker
        accepts the connection.
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
