"""Sends records through librdkafka: queued at once, compressed and sent by its own threads, awaited together."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.dlq import Produce

POLL_S = 0.1
FULL_S = 0.01
METADATA_S = 15.0


class NoSuchPartition(ValueError):
    """A record for a partition that its topic does not have."""


class NotDelivered(KafkaException):  # type: ignore[misc]
    """A record that the broker did not confirm: (KafkaError, topic)."""


def _too_late(record: Produce) -> NotDelivered:
    return NotDelivered(KafkaError(KafkaError._MSG_TIMED_OUT), record.topic)


class _Confirmations:
    """Counts the reports of one call, which come in the poll thread, and wakes the caller at the last."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._failed: tuple[KafkaError, str] | None = None
        self.last_offset: int | None = None
        self.all_in: asyncio.Future[None] = self._loop.create_future()

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """One record is confirmed, or will never be."""
        if error is not None and self._failed is None:
            self._failed = (error, str(message.topic()))
        self.fewer(1)

    def last_delivered(self, error: KafkaError | None, message: Message) -> None:
        """The same of the last one."""
        offset = message.offset()
        if error is None and offset is not None and offset >= 0:
            self.last_offset = offset
        self.delivered(error, message)

    def fewer(self, count: int) -> None:
        """So many are not awaited any more."""
        with self._lock:
            self._left -= count
            left = self._left
        if not left:
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self.all_in.done():
            return  # nobody waits any more
        if self._failed is None:
            self.all_in.set_result(None)
        else:
            self.all_in.set_exception(NotDelivered(*self._failed))


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
        self._producer: Producer | None = None
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None
        self._partitions: dict[str, int] = {}

    async def send(self, records: Sequence[Produce]) -> int | None:
        """Sends all records, those of one partition in order, and returns when every one is confirmed (acks=all).

        Returns:
            The offset of the last record, None if there is none or the broker did not say.
        Raises:
            NoSuchPartition: before anything is sent.
            NotDelivered: the broker refused one, or did not confirm it in time.
        """
        if not records:
            return None
        producer = self._started()
        for topic, partition in {(record.topic, record.partition) for record in records}:
            if partition is not None:
                await self._check(producer, topic, partition)
        try:
            return await self._send(producer, records)
        except NotDelivered as error:
            raise NotDelivered(self._fatal or error.args[0], error.args[1]) from error

    async def _send(self, producer: Producer, records: Sequence[Produce]) -> int | None:
        confirmations = _Confirmations(len(records))
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience
        sent, refused = 0, None
        try:
            for record in records:
                report = confirmations.delivered if sent + 1 < len(records) else confirmations.last_delivered
                while not self._queued(producer, record, report):
                    if clock() > deadline:
                        raise _too_late(record)
                    await asyncio.sleep(FULL_S)  # librdkafka does not say when its queue has room again
                sent += 1
        except NotDelivered as error:
            refused = error
            confirmations.fewer(len(records) - sent)
        # Also when one was refused: nothing may be in flight unwatched.
        confirmed, _ = await asyncio.wait({confirmations.all_in}, timeout=max(0.0, deadline - clock()))
        if refused is None and not confirmed:
            refused = _too_late(records[0])
        if refused is not None:
            raise refused
        await confirmations.all_in
        return confirmations.last_offset

    def close(self) -> None:
        """Ends the poll thread. What was not confirmed by now is not waited for."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()

    def _started(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(self._config)
            self._poller = threading.Thread(target=self._poll, args=(self._producer,), name="producer", daemon=True)
            self._poller.start()
        return self._producer

    def _heard(self, error: KafkaError) -> None:
        # What comes after a fatal error says no more than that there was one.
        if error.fatal() and self._fatal is None:
            self._fatal = error

    def _poll(self, producer: Producer) -> None:
        while not self._closing.is_set():
            try:
                producer.poll(POLL_S)
            except KafkaException as error:
                if not error.args[0].fatal():
                    raise
                # The reports of what it failed come all the same.
                self._heard(error.args[0])
                self._closing.wait(POLL_S)

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
