"""Sends records through librdkafka: queued at once, compressed and sent by its own threads, awaited together."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.dlq import Produce
from tentalis.kafka import hear_reports, unconfirmed

FULL_S = 0.01
METADATA_S = 15.0
CAUSE_S = 1.0
KNOWN_S = 600.0
"""For how long a broker knows a producer by what it wrote to a partition (`producer.id.expiration.ms`: a day)."""


class NoSuchPartition(ValueError):
    """A record for a partition that its topic does not have."""


class NotDelivered(KafkaException):  # type: ignore[misc]
    """A record that the broker did not confirm: (KafkaError, topic)."""


class _Confirmations:
    """Counts the reports of one call, which come in the poll thread, and wakes the caller at the last one or at the
    first that is none."""

    def __init__(self, count: int, refused: Callable[[NotDelivered], None]) -> None:
        self._left = count
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._last_offset = -1
        self.all_in: asyncio.Future[int] = self._loop.create_future()
        """The offset of the last record."""

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """One record is confirmed, or will never be."""
        why = unconfirmed(error, message)
        if why is not None:
            failed = NotDelivered(why, str(message.topic()))
            self._refused(failed)
            self._wake(failed)
            return
        self._left -= 1
        if not self._left:
            self._wake(None)

    def last_delivered(self, error: KafkaError | None, message: Message) -> None:
        """The same of the last one."""
        self._last_offset = message.offset() or 0
        self.delivered(error, message)

    def _wake(self, failed: NotDelivered | None) -> None:
        self._loop.call_soon_threadsafe(self._end, failed)

    def _end(self, failed: NotDelivered | None) -> None:
        if self.all_in.done():
            return  # it failed before, or nobody waits any more
        if failed is None:
            self.all_in.set_result(self._last_offset)
        else:
            self.all_in.set_exception(failed)


class KafkaSink:
    """Produces through librdkafka, all lanes through one producer.

    aiokafka's compresses in the event loop, which is where everything else is waiting.

    Args:
        config: of the producer (`tentalis.kafka.producer_config`): idempotent, acks=all, and without a timeout of its
            own (`delivery.timeout.ms` 0): a record that it gave up would be missing in front of what comes behind it.
        patience: seconds after which records count as not delivered. Who hears so must end without sending anything.
    """

    def __init__(self, config: Mapping[str, Any], patience: float = 60.0) -> None:
        self._patience = patience
        self._config = dict(config) | {"error_cb": self._heard}
        self._fatal: KafkaError | None = None
        self._refused: NotDelivered | None = None
        self._producer: Producer | None = None
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None
        self._partitions: dict[str, int] = {}
        self._written: dict[tuple[str, int | None], float] = {}
        """When something was last confirmed on a partition."""

    async def send(self, records: Sequence[Produce]) -> int:
        """Sends all records, at least one, those of one partition in order, and returns when every one is confirmed
        (acks=all).

        Returns:
            The offset of the last record.
        Raises:
            NoSuchPartition: before anything is sent.
            NotDelivered: the broker refused one, or did not confirm it in time.
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
        except NotDelivered as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            raise await self._cause(error) from error

    async def _send(self, producer: Producer, records: Sequence[Produce]) -> int:
        place, now = (records[0].topic, records[0].partition), time.monotonic()
        if place[1] is not None and len(records) > 1 and now - self._written.get(place, -KNOWN_S) >= KNOWN_S:
            # Of a producer that it does not know (any more) a broker takes whatever comes for the next record: where
            # it refuses a request for want of a leader or of replicas, it may write the following one (KAFKA-15591).
            await self._confirmed(producer, records[:1])
            records = records[1:]
        last = await self._confirmed(producer, records)
        self._written[place] = now
        return last

    async def _confirmed(self, producer: Producer, records: Sequence[Produce]) -> int:
        confirmations = _Confirmations(len(records), self._refuse)
        for number, record in enumerate(records, 1):
            report = confirmations.delivered if number < len(records) else confirmations.last_delivered
            # librdkafka does not say when its queue has room again.
            while not self._queued(producer, record, report):  # noqa: ASYNC110
                await asyncio.sleep(FULL_S)
        return await confirmations.all_in

    async def settled(self) -> None:
        """Returns when nothing is on its way any more, whoever sent it and waits for it no more.

        Raises:
            NotDelivered: something still is, for too long.
        """
        try:
            async with asyncio.timeout(self._patience):
                while self._producer is not None and len(self._producer):  # noqa: ASYNC110
                    await asyncio.sleep(FULL_S)
        except TimeoutError:
            raise self._too_late("of batches that were given up") from None

    async def _cause(self, error: NotDelivered) -> NotDelivered:
        """Why nothing is sent any more: what was refused, perhaps of another lane, whose report may be on its way."""
        for _ in range(round(CAUSE_S / FULL_S)):
            if self._refused is not None:
                return self._refused
            await asyncio.sleep(FULL_S)
        return NotDelivered(self._fatal or error.args[0], error.args[1])

    def _refuse(self, failed: NotDelivered) -> None:
        if self._refused is None and failed.args[0].code() != KafkaError._FATAL:
            self._refused = failed

    def _too_late(self, topic: str) -> NotDelivered:
        # After a fatal error nothing is sent, and nothing reported, any more.
        return NotDelivered(self._fatal or KafkaError(KafkaError._MSG_TIMED_OUT), topic)

    def close(self) -> None:
        """Ends the poll thread. What was not confirmed by now is not waited for."""
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
        """False if the producer's queue is full."""
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
            raise NotDelivered(error.args[0], record.topic) from error
        return True

    async def _check(self, producer: Producer, topic: str, partition: int) -> None:
        count = self._partitions.get(topic)
        if count is None:
            found = (await asyncio.to_thread(producer.list_topics, topic, METADATA_S)).topics[topic]
            if found.error is not None:
                raise NotDelivered(found.error, topic)
            count = self._partitions[topic] = len(found.partitions)
        if not 0 <= partition < count:
            raise NoSuchPartition(
                f"{topic} has {count} partitions, there is no {partition}: topics that share a key must have the same "
                "partition count (`tentalis topics apply`)"
            )
