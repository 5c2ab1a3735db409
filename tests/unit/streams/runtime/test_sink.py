"""The sink, against the broker that librdkafka has in itself for tests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.runtime.dlq import Produce
from streams.runtime.sink import KafkaSink, NoSuchPartition, RecordNotDelivered
from tentalis.kafka.config import producer_config
from tentalis.kafka.partitioner import partition_of
from tentalis.service.settings import Settings

MOCK = {"test.mock.num.brokers": 1, "enable.idempotence": True, "linger.ms": 1, "log_level": 0}
PARTITIONS = 4  # of every topic of that broker


@pytest.fixture
def sink() -> Iterator[KafkaSink]:
    sink = KafkaSink(MOCK)
    yield sink
    sink.close()


def records(count: int, partition: int | None = None) -> list[Produce]:
    return [Produce("t", b"k%d" % i, b"v", (("name", b"value"),), partition) for i in range(count)]


def test_every_sender_gets_the_confirmations_of_its_own_records(sink: KafkaSink) -> None:
    async def lanes() -> None:
        await asyncio.gather(*(sink.send(records(50, lane)) for lane in range(PARTITIONS)), sink.send(records(50)))

    asyncio.run(lanes())


def test_a_partition_that_is_not_there_is_refused_before_anything_is_sent(sink: KafkaSink) -> None:
    with pytest.raises(NoSuchPartition, match="t has 4 partitions, but no partition 9"):
        asyncio.run(sink.send(records(1, 9)))


def test_a_record_that_nobody_confirms_is_an_error_that_names_the_topic() -> None:
    sink = KafkaSink(
        {"bootstrap.servers": "127.0.0.1:9", "delivery.timeout.ms": 0, "linger.ms": 1, "log_level": 0}, 0.2
    )
    with pytest.raises(RecordNotDelivered) as failed:
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
    with pytest.raises(RecordNotDelivered) as failed:
        asyncio.run(sink.send(records(200)))
    sink.close()
    assert failed.value.args[0].code() == KafkaError._MSG_TIMED_OUT


def test_a_record_that_is_too_large_is_an_error() -> None:
    sink = KafkaSink(MOCK | {"message.max.bytes": 2000})
    with pytest.raises(RecordNotDelivered) as failed:
        asyncio.run(sink.send([*records(5, 0), Produce("t", b"k", b"v" * 5000), *records(5, 0)]))
    sink.close()
    assert failed.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE


class Scripted:
    """librdkafka's producer as far as the sink knows it. A test says what becomes of the records, in order: an error,
    the offset, None where librdkafka does not know it; of the others nothing is heard."""

    def __init__(self, *says: KafkaError | int | None) -> None:
        self.says = deque(says)
        self.least = 1
        """Nothing is reported before so many wait for it."""
        self.waiting: deque[Callable[[KafkaError | None, Message], None]] = deque()
        self.queued = 0
        self.reports: list[int] = []
        """How many records were queued when each was reported."""
        self.fatal: KafkaError | None = None
        self.dead = False

    def __call__(self, config: Mapping[str, object]) -> "Scripted":
        return self

    def __len__(self) -> int:
        return len(self.waiting)

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=range(PARTITIONS))})

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, report: Any, *, headers: object) -> None:
        if self.dead:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.queued += 1
        self.waiting.append(report)

    def poll(self, seconds: float) -> None:
        time.sleep(0.001)
        if len(self.waiting) < self.least:
            return
        if self.fatal is not None:
            error, self.fatal, self.dead = self.fatal, None, True
            raise KafkaException(error)
        while self.waiting and self.says:
            said = self.says.popleft()
            error = said if isinstance(said, KafkaError) else None
            self.reports.append(self.queued)
            message: Any = SimpleNamespace(topic=lambda: "t", offset=lambda said=said: said)
            self.waiting[0](error, message)
            self.waiting.popleft()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[KafkaSink, Scripted]]]:
    sinks: list[KafkaSink] = []

    def made(*says: KafkaError | int | None, patience: float = 60.0) -> tuple[KafkaSink, Scripted]:
        producer = Scripted(*says)
        monkeypatch.setattr("streams.runtime.sink.Producer", producer)
        sinks.append(KafkaSink({}, patience))
        return sinks[-1], producer

    yield made
    for sink in sinks:
        sink.close()


def test_what_librdkafka_only_infers_to_be_written_is_not_confirmed(scripted: Any) -> None:
    sink, _ = scripted(7, None, 8)
    with pytest.raises(RecordNotDelivered, match="but not this one"):
        asyncio.run(sink.send(records(3)))


def test_the_first_record_on_a_partition_goes_ahead_alone(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, producer = scripted(*range(9))

    async def main() -> None:
        assert await sink.send(records(3, 1)) == 2
        assert producer.reports[0] == 1
        producer.least = 3  # a record that went ahead would wait for its report in vain
        assert await sink.send(records(3, 1)) == 5
        producer.least = 1
        monkeypatch.setattr("streams.runtime.sink.KNOWN_S", 0.0)
        assert await sink.send(records(3, 1)) == 8
        assert producer.reports[6] == 7

    asyncio.run(main())


def test_what_was_refused_is_said_at_once_though_nothing_is_heard_of_the_rest(scripted: Any) -> None:
    """librdkafka makes a fatal error of it (`enable.gapless.guarantee`), and sends and reports nothing any more."""
    sink, producer = scripted(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    producer.fatal, producer.least = KafkaError(KafkaError._GAPLESS_GUARANTEE, "no gap", fatal=True), 3
    with pytest.raises(RecordNotDelivered) as failed:
        asyncio.run(asyncio.wait_for(sink.send(records(3)), 30))
    assert failed.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_after_a_refusal_other_senders_raise_its_cause_and_not_only_the_fatal_error(scripted: Any) -> None:
    sink, producer = scripted(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    producer.fatal, producer.least = KafkaError(KafkaError._GAPLESS_GUARANTEE, "no gap", fatal=True), 3

    async def lanes() -> list[Any]:
        refused = asyncio.create_task(sink.send(records(3)))
        while not producer.dead:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return await asyncio.gather(sink.send(records(1)), refused, return_exceptions=True)

    other, refused = asyncio.run(asyncio.wait_for(lanes(), 30))
    assert [failed.args[0].code() for failed in (other, refused)] == [KafkaError.TOPIC_AUTHORIZATION_FAILED] * 2


def test_what_was_given_up_is_waited_for_before_the_log_is_read(scripted: Any) -> None:
    sink, producer = scripted(patience=0.2)

    async def main() -> None:
        await sink.settled()
        sending = asyncio.create_task(sink.send(records(3)))
        while not producer.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        sending.cancel()
        await asyncio.wait({sending})
        with pytest.raises(RecordNotDelivered):
            await sink.settled()
        producer.says.extend(range(3))
        await sink.settled()

    asyncio.run(main())


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
