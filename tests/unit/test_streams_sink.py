"""The sink, against the broker that librdkafka has in itself for tests."""

import asyncio
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

from streams.dlq import Produce
from streams.sink import KafkaSink, NoSuchPartition, NotDelivered

MOCK = {"test.mock.num.brokers": 1, "enable.idempotence": True, "linger.ms": 1, "log_level": 0}
PARTITIONS = 4  # of every topic of that broker


@pytest.fixture
def sink() -> Iterator[KafkaSink]:
    sink = KafkaSink(MOCK)
    yield sink
    sink.close()


def records(count: int, partition: int | None = None) -> list[Produce]:
    return [Produce("t", b"k%d" % i, b"v", (("name", b"value"),), partition) for i in range(count)]


def test_every_lane_hears_of_its_own_records(sink: KafkaSink) -> None:
    async def lanes() -> None:
        await asyncio.gather(*(sink.send(records(50, lane)) for lane in range(PARTITIONS)), sink.send(records(50)))
        await sink.send([])

    asyncio.run(lanes())


def test_a_partition_that_is_not_there_is_refused_before_anything_is_sent(sink: KafkaSink) -> None:
    with pytest.raises(NoSuchPartition, match="t has 4 partitions, there is no 9"):
        asyncio.run(sink.send(records(1, 9)))


def test_a_record_that_nobody_confirms_is_an_error_that_names_the_topic() -> None:
    sink = KafkaSink(
        {"bootstrap.servers": "127.0.0.1:9", "delivery.timeout.ms": 0, "linger.ms": 1, "log_level": 0}, 0.2
    )
    with pytest.raises(NotDelivered) as failed:
        asyncio.run(sink.send(records(3)))
    sink.close()
    error, topic = failed.value.args
    assert (error.code(), topic) == (KafkaError._MSG_TIMED_OUT, "t")


def test_a_full_queue_is_waited_for() -> None:
    sink = KafkaSink(MOCK | {"queue.buffering.max.messages": 10})
    asyncio.run(sink.send(records(200, 1)))
    sink.close()


def test_a_queue_that_stays_full_is_an_error_too() -> None:
    config = {"bootstrap.servers": "127.0.0.1:9", "delivery.timeout.ms": 0, "log_level": 0}
    sink = KafkaSink(config | {"queue.buffering.max.messages": 10}, 0.2)
    with pytest.raises(NotDelivered) as failed:
        asyncio.run(sink.send(records(200)))
    sink.close()
    assert failed.value.args[0].code() == KafkaError._MSG_TIMED_OUT


def test_a_record_that_is_too_large_leaves_nothing_unwatched() -> None:
    sink = KafkaSink(MOCK | {"message.max.bytes": 2000})
    with pytest.raises(NotDelivered) as failed:
        asyncio.run(sink.send([*records(5, 0), Produce("t", b"k", b"v" * 5000), *records(5, 0)]))
    sink.close()
    assert failed.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
