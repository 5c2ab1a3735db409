"""What the sink asks of aiokafka's producer."""

import asyncio
from typing import Any

from streams.dlq import Produce
from streams.sink import KafkaSink


class Builder:
    def append(self, **_: Any) -> object:
        return object()

    def close(self) -> None:
        """Nothing to close."""


class Producer:
    """Takes its time, and remembers how many waited for one partition at once."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, int], int] = {}
        self.most: dict[tuple[str, int], int] = {}

    async def partitions_for(self, topic: str) -> set[int]:
        return {0, 1}

    def create_batch(self) -> Builder:
        return Builder()

    async def send_batch(self, batch: Builder, topic: str, *, partition: int) -> "asyncio.Future[None]":
        place = topic, partition
        self.waiting[place] = self.waiting.get(place, 0) + 1
        self.most[place] = max(self.most.get(place, 0), self.waiting[place])
        await asyncio.sleep(0)
        self.waiting[place] -= 1
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        confirmed.set_result(None)
        return confirmed


def test_one_at_a_time_waits_for_a_partition_and_partitions_do_not_wait_for_each_other() -> None:
    producer = Producer()
    overlapped: list[int] = []

    async def sending() -> None:
        sink = KafkaSink(lambda: producer)
        records = [[Produce("t", b"k", b"v", partition=i % 2)] for i in range(20)]
        sends = [asyncio.create_task(sink.send(each)) for each in records]
        while not all(send.done() for send in sends):
            overlapped.append(sum(producer.waiting.values()))
            await asyncio.sleep(0)
        await asyncio.gather(*sends)

    asyncio.run(sending())
    assert producer.most == {("t", 0): 1, ("t", 1): 1}
    assert max(overlapped) == 2
