"""Sends records through librdkafka: its threads compress and send them, and the event loop awaits the confirmations."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.runtime.dlq import Produce
from tentalis.kafka.errors import unconfirmed
from tentalis.kafka.producer import hear_reports

FULL_S = 0.01
METADATA_S = 15.0
CAUSE_S = 1.0
KNOWN_S = 600.0
"""Seconds after the last write to a partition for which the broker is assumed to remember the producer (it does for
`producer.id.expiration.ms`, a day)."""


class NoSuchPartition(ValueError):
    """A record for a partition that its topic does not have."""


class RecordNotDelivered(KafkaException):  # type: ignore[misc]
    """A record that the broker did not confirm: (KafkaError, topic)."""


class _Confirmations:
    """Counts the delivery reports of one call, which arrive in the poll thread; wakes the caller at the last report or
    at the first failure."""

    def __init__(self, count: int, refused: Callable[[RecordNotDelivered], None]) -> None:
        self._left = count
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._last_offset = -1
        self.all_in: asyncio.Future[int] = self._loop.create_future()
        """The offset of the last record."""

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """Delivery report of one record: confirmed, or failed permanently."""
        why = unconfirmed(error, message)
        if why is not None:
            failed = RecordNotDelivered(why, str(message.topic()))
            self._refused(failed)
            self._wake(failed)
            return
        self._left -= 1
        if not self._left:
            self._wake(None)

    def last_delivered(self, error: KafkaError | None, message: Message) -> None:
        """Delivery report of the last record."""
        self._last_offset = message.offset() or 0
        self.delivered(error, message)

    def _wake(self, failed: RecordNotDelivered | None) -> None:
        self._loop.call_soon_threadsafe(self._end, failed)

    def _end(self, failed: RecordNotDelivered | None) -> None:
        if self.all_in.done():
            return  # an earlier record failed, or the caller was cancelled
        if failed is None:
            self.all_in.set_result(self._last_offset)
        else:
            self.all_in.set_exception(failed)


class KafkaSink:
    """Produces through librdkafka, for all partition queues through one producer.

    aiokafka's producer would compress in the event loop and block everything else.

    Args:
        config: settings of the producer (`tentalis.kafka.config.producer_config`): idempotent, acks=all, and without a
            delivery timeout (`delivery.timeout.ms` 0): if librdkafka gave up a record, later records of its partition
            would still be written.
        patience: seconds after which records count as not delivered. The caller must then end without sending again.
    """

    def __init__(self, config: Mapping[str, Any], patience: float = 60.0) -> None:
        self._patience = patience
        self._config = dict(config) | {"error_cb": self._heard}
        self._fatal: KafkaError | None = None
        self._refused: RecordNotDelivered | None = None
        self._producer: Producer | None = None
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None
        self._partitions: dict[str, int] = {}
        self._written: dict[tuple[str, int | None], float] = {}
        """Monotonic time of the last confirmed write to a partition."""

    async def send(self, records: Sequence[Produce]) -> int:
        """Sends all records (at least one), those of one partition in order; returns when every one is confirmed
        (acks=all).

        Returns:
            The offset of the last record.
        Raises:
            NoSuchPartition: before anything is sent.
            RecordNotDelivered: the broker rejected a record, or did not confirm it in time.
        """
        producer = self._started()
        for topic, partition in {(record.topic, record.partition) for record in records}:
            if partition is not None:
                await self._check(producer, topic, partition)
        try:
            async with asyncio.timeout(self._patience):
                return await self._send(producer, records)
        except TimeoutError:
            raise self._too_late(records[0].topic) from None
        except RecordNotDelivered as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            raise await self._cause(error) from error

    async def _send(self, producer: Producer, records: Sequence[Produce]) -> int:
        place, now = (records[0].topic, records[0].partition), time.monotonic()
        if place[1] is not None and len(records) > 1 and now - self._written.get(place, -KNOWN_S) >= KNOWN_S:
            # A broker that does not know the producer (any more) accepts any sequence number: if it rejects a request
            # for lack of a leader or of replicas, it may still write the following one (KAFKA-15591).
            await self._confirmed(producer, records[:1])
            records = records[1:]
        last = await self._confirmed(producer, records)
        self._written[place] = now
        return last

    async def _confirmed(self, producer: Producer, records: Sequence[Produce]) -> int:
        confirmations = _Confirmations(len(records), self._refuse)
        for number, record in enumerate(records, 1):
            report = confirmations.delivered if number < len(records) else confirmations.last_delivered
            # librdkafka does not signal when its queue has room again.
            while not self._queued(producer, record, report):  # noqa: ASYNC110
                await asyncio.sleep(FULL_S)
        return await confirmations.all_in

    async def settled(self) -> None:
        """Returns when no record is in flight, including those whose senders were cancelled.

        Raises:
            RecordNotDelivered: a record is still in flight after `patience` seconds.
        """
        try:
            async with asyncio.timeout(self._patience):
                while self._producer is not None and len(self._producer):  # noqa: ASYNC110
                    await asyncio.sleep(FULL_S)
        except TimeoutError:
            raise self._too_late("(records of abandoned batches)") from None

    async def _cause(self, error: RecordNotDelivered) -> RecordNotDelivered:
        """The cause of a fatal error: the rejected record, perhaps of another partition queue, whose delivery report
        may still arrive."""
        for _ in range(round(CAUSE_S / FULL_S)):
            if self._refused is not None:
                return self._refused
            await asyncio.sleep(FULL_S)
        return RecordNotDelivered(self._fatal or error.args[0], error.args[1])

    def _refuse(self, failed: RecordNotDelivered) -> None:
        if self._refused is None and failed.args[0].code() != KafkaError._FATAL:
            self._refused = failed

    def _too_late(self, topic: str) -> RecordNotDelivered:
        # After a fatal error librdkafka neither sends nor reports anything.
        return RecordNotDelivered(self._fatal or KafkaError(KafkaError._MSG_TIMED_OUT), topic)

    def close(self) -> None:
        """Ends the poll thread, without waiting for unconfirmed records."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()

    def _started(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(self._config)
            self._poller = threading.Thread(
                target=hear_reports, args=(self._producer, self._closing, self._heard), name="producer", daemon=True
            )
            self._poller.start()
        return self._producer

    def _heard(self, error: KafkaError) -> None:
        if error.fatal() and self._fatal is None:
            self._fatal = error

    @staticmethod
    def _queued(producer: Producer, record: Produce, report: Callable[[KafkaError | None, Message], None]) -> bool:
        """Queues a record at the producer. Returns False if the producer's queue is full."""
        try:
            producer.produce(
                record.topic,
                record.value,
                record.key,
                -1 if record.partition is None else record.partition,
                report,
                headers=list(record.headers),
            )
        except BufferError:
            return False
        except KafkaException as error:
            raise RecordNotDelivered(error.args[0], record.topic) from error
        return True

    async def _check(self, producer: Producer, topic: str, partition: int) -> None:
        count = self._partitions.get(topic)
        if count is None:
            found = (await asyncio.to_thread(producer.list_topics, topic, METADATA_S)).topics[topic]
            if found.error is not None:
                raise RecordNotDelivered(found.error, topic)
            count = self._partitions[topic] = len(found.partitions)
        if not 0 <= partition < count:
            raise NoSuchPartition(
                f"{topic} has {count} partitions, but no partition {partition}: topics that share a key must have the "
                "same partition count (`tentalis topics apply`)"
            )
