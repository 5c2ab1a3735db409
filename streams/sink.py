"""Sends records through aiokafka's producer: all at once, in batches built per partition, awaited together."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from streams.dlq import Produce


class NoSuchPartition(ValueError):
    """A record for a partition that its topic does not have."""


@lru_cache(maxsize=65536)
def murmur2_partition(key: bytes, partitions: int) -> int:
    """The partition of a key, as the JVM's and librdkafka's `murmur2` partitioners choose it."""
    from aiokafka.partitioner import murmur2

    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


class KafkaSink:
    """Produces through aiokafka: one builder per partition instead of one future per record, a third of the cost.

    Args:
        producer: returns the started AIOKafkaProducer.
    """

    def __init__(self, producer: Callable[[], Any]) -> None:
        self._producer = producer
        self._partitions: dict[str, int] = {}
        self._doors: dict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def send(self, records: Sequence[Produce]) -> None:
        """Sends all records, those of one partition in order, and returns when every one is confirmed (acks=all).

        Raises:
            NoSuchPartition: before anything is sent.
            KafkaError: the broker refused, or did not confirm in time.
        """
        producer = self._producer()
        groups: dict[tuple[str, int], list[Produce]] = defaultdict(list)
        for record in records:
            groups[record.topic, await self._partition(producer, record)].append(record)
        confirmations: list[asyncio.Future[Any]] = []
        try:
            for (topic, partition), group in groups.items():
                for batch in _batches(producer, group):
                    # One at a time waits for the partition before it is taken: aiokafka's `add_batch` takes the time
                    # since its first wait off its time-out after *every* wait, and wakes all who wait for a partition,
                    # so a dozen lanes with records for one hot key time out long before their time.
                    async with self._doors[topic, partition]:
                        confirmations.append(await producer.send_batch(batch, topic, partition=partition))
        finally:
            # Also when a send failed: nothing may be in flight unwatched.
            outcomes = await asyncio.gather(*confirmations, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _partition(self, producer: Any, record: Produce) -> int:
        count = self._partitions.get(record.topic)
        if count is None:
            count = self._partitions[record.topic] = len(await producer.partitions_for(record.topic))
        if record.partition is not None:
            if not 0 <= record.partition < count:
                raise NoSuchPartition(
                    f"{record.topic} has {count} partitions, there is no {record.partition}: topics that share a key "
                    "must have the same partition count (`tentalis topics apply`)"
                )
            return record.partition
        return murmur2_partition(record.key or b"", count)


def _batches(producer: Any, records: Sequence[Produce]) -> list[Any]:
    batches = [producer.create_batch()]
    for record in records:
        if not _append(batches[-1], record):
            batches.append(producer.create_batch())
            # The first record of a batch is taken whatever its size; the limit on it was checked before.
            if not _append(batches[-1], record):
                raise ValueError(f"a record for {record.topic} fits into no batch")
    for batch in batches:
        batch.close()
    return batches


def _append(batch: Any, record: Produce) -> bool:
    return batch.append(timestamp=None, key=record.key, value=record.value, headers=list(record.headers)) is not None
