"""The sink, against the broker that librdkafka has in itself for tests."""

import asyncio
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, Message, Producer

from streams.dlq import Produce
from streams.placement import partition_of
from streams.sink import KafkaSink, NoSuchPartition, NotDelivered
from tentalis.config import Settings
from tentalis.kafka import producer_config

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


def test_who_is_cancelled_while_the_queue_is_full_does_not_wait_for_the_reports() -> None:
    """A partition is to be given up then, and the group waits."""
    config = {"bootstrap.servers": "127.0.0.1:9", "queue.buffering.max.messages": 10, "log_level": 0}
    sink = KafkaSink(config | {"delivery.timeout.ms": 300_000})

    async def main() -> None:
        sending = asyncio.create_task(sink.send(records(200)))
        while sink._producer is None or len(sink._producer) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.wait({sending}, timeout=60)
        assert sending.cancelled()

    asyncio.run(main())
    sink.close()


def test_a_key_is_looked_for_where_librdkafka_puts_it_as_we_set_it_up() -> None:
    keys = [b"\xff\xfe\x80", *(b"x" * size for size in range(1, 20)), *(b"task-%d" % number for number in range(50))]
    found: dict[bytes, int] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        found[message.key()] = message.partition()

    config = producer_config(Settings(bootstrap="127.0.0.1:9"))
    producer = Producer({"partitioner": config["partitioner"]} | MOCK)
    for key in keys:
        producer.produce("t", b"v", key, on_delivery=delivered)
    assert producer.flush(60) == 0
    assert found == {key: partition_of(key, PARTITIONS) for key in keys}
    assert len(set(found.values())) == PARTITIONS
