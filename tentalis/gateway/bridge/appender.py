"""Appends records to the log and tells each caller when the broker has acknowledged them."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

from schemas.codec import Codec
from schemas.records import Feedback, Record, Result, Task
from tentalis import tracing
from tentalis.config import Settings
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.failure import Refused

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

log = logging.getLogger(__name__)

# The producer gives a record up after this time and says so; nobody is left without an answer.
DELIVERY_S = 10.0
RETRY_AFTER_S = 2
# Records that wait in the producer; past it callers are told to come again.
MOST_WAITING = 10_000


class Appender:
    """One producer, and a thread that hands its acknowledgements to the event loop."""

    def __init__(self, settings: Settings, source: str, codec: Codec) -> None:
        from confluent_kafka import Producer

        from tentalis.kafka import producer_config

        limits = {"delivery.timeout.ms": int(DELIVERY_S * 1000), "queue.buffering.max.messages": MOST_WAITING}
        self._producer = Producer(producer_config(settings) | limits)
        self._codec, self._source = codec, source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="bridge-appender", daemon=True)
        self._thread.start()

    async def append(self, topic: str, record: Record) -> Fact:
        """Where a record lies, once the broker has acknowledged it.

        Raises Refused: 413 for a record over the limit, 503 where the broker does not acknowledge: the record may be on
        the log or not, and sending it again is safe.
        """
        from confluent_kafka import KafkaException

        from tentalis.kafka import RecordTooLarge, checked_size, headers_of, now_ms

        try:
            value = checked_size(topic, record.key, self._codec.encode(topic, record))
        except RecordTooLarge as error:
            raise Refused(413, str(error)) from error
        loop = asyncio.get_running_loop()
        ack: asyncio.Future[Fact] = loop.create_future()

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                answer: Fact | Refused = _away(error.str())
            else:
                at = int(message.timestamp()[1])
                place = (str(message.topic()), int(message.partition()), int(message.offset()))
                answer = Fact(*place, at if at > 0 else now_ms(), record.event_id)
            try:
                loop.call_soon_threadsafe(_settle, ack, answer)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                log.debug("an acknowledgement came after the end: %s", answer)

        headers = headers_of(record, self._source, _trace(record))
        arguments: dict[str, Any] = {"headers": headers, "on_delivery": delivered}
        try:
            self._producer.produce(topic, value, record.key.encode(), **arguments)
        except (BufferError, KafkaException) as error:
            raise _away(str(error)) from error
        return await ack

    def _serve(self) -> None:
        while not self._stop.is_set():
            self._producer.poll(0.1)

    def close(self) -> None:
        """Waits for what is under way, DELIVERY_S seconds at most."""
        self._stop.set()
        self._thread.join()
        self._producer.flush(DELIVERY_S)


def _trace(record: Record) -> str | None:
    """The trace that a record belongs to: that of its task."""
    if isinstance(record, Task):
        with tracing.span("task", root=record.task_id, producer=True, task_id=record.task_id) as span:
            return span.traceparent
    return tracing.derived(record.key) if isinstance(record, Result | Feedback) else None


def _settle(ack: asyncio.Future[Fact], answer: Fact | Refused) -> None:
    if ack.done():  # the caller has hung up
        return
    if isinstance(answer, Refused):
        ack.set_exception(answer)
    else:
        ack.set_result(answer)


def _away(why: str) -> Refused:
    return Refused(
        503,
        f"the log did not acknowledge it ({why}): send the same again, it is written once",
        "api_error",
        retry_after_s=RETRY_AFTER_S,
    )
