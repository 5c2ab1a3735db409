"""The gateway's producer, and how it follows the log, without a broker."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Record
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.gateway.api.log import BridgeLogFollower
from tentalis.gateway.api.record_log import LogBatch
from tentalis.gateway.recording import event_log
from tentalis.gateway.recording.spool import SpooledRecord
from tentalis.kafka.config import producer_config
from tentalis.service.settings import Settings
from tests.support.join_support import CODEC
from tests.support.stream_records import make_task


def test_who_waits_for_a_record_hears_that_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka has no offset for it then. The thread that polls lives on: twice, therefore."""

    def impatient(settings: Settings) -> dict[str, Any]:
        return producer_config(settings) | {"delivery.timeout.ms": 100}

    monkeypatch.setattr(event_log, "producer_config", impatient)
    log = event_log.EventLog(Settings(bootstrap="127.0.0.1:9"), "tentalis/test", CODEC)
    try:
        for event_id in ("first", "second"):
            heard: list[KafkaError | RecordPlace] = []
            done = threading.Event()

            def said(became: KafkaError | RecordPlace, heard: list[Any] = heard, done: threading.Event = done) -> None:
                heard.append(became)
                done.set()

            log.send(SpooledRecord(event_id, "t", b"k", b"v", (), 1), said)
            assert done.wait(60), f"nothing was heard of the {event_id}"
            assert isinstance(heard[0], KafkaError) and heard[0].code() == KafkaError._MSG_TIMED_OUT
    finally:
        log.close()


def test_a_fatal_error_is_known_and_the_reports_behind_it_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """confluent-kafka raises it where reports are waited for. The gateway ends by it, instead of waiting in vain."""
    fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "desynchronized", fatal=True)
    reports: list[Any] = []

    class Producer:
        def __init__(self, config: object) -> None:
            self.raised = False

        def produce(self, *record: object, on_delivery: Any, **more: object) -> None:
            reports.append(on_delivery)

        def poll(self, seconds: float) -> None:
            time.sleep(0.001)
            if reports and not self.raised:
                self.raised = True
                raise KafkaException(fatal)
            while reports:
                message: Any = SimpleNamespace(partition=lambda: 0, offset=lambda: None)
                reports.pop()(KafkaError(KafkaError._FATAL), message)

        def flush(self, seconds: float) -> None: ...

    monkeypatch.setattr(event_log, "Producer", Producer)
    log, done = event_log.EventLog(Settings(bootstrap="127.0.0.1:9"), "tentalis/test", CODEC), threading.Event()
    try:
        log.send(SpooledRecord("first", "t", b"k", b"v", (), 1), lambda became: done.set())
        assert done.wait(60) and log.fatal_error == "desynchronized"
    finally:
        log.close()


def test_what_cannot_be_decoded_while_the_schemas_are_away_is_read_again() -> None:
    """With all that was read along with it: nothing of that was handed over."""

    class Away(Codec):
        away = True

        def decode(self, value: bytes | None, **where: Any) -> Record:
            if self.away and where["offset"] == 1:
                raise SchemasUnavailable("no registry answers")
            return super().decode(value, **where)

    def message(offset: int) -> Any:
        value = CODEC.encode(topics.TASKS, make_task(f"t{offset}"))
        fields = {"topic": topics.TASKS, "partition": 0, "offset": offset, "value": value, "key": b"t"}
        known = {name: (lambda said=said: said) for name, said in fields.items()}
        return SimpleNamespace(timestamp=lambda: (1, 1), headers=list, **known)

    async def follow() -> list[int]:
        codec, taken = Away(), list[LogBatch]()
        following = BridgeLogFollower(Settings(bootstrap="127.0.0.1:9"), codec, since_ms=0, max_records=10)
        following._loop, following._on_batch, following._decode_all = (
            asyncio.get_running_loop(),
            taken.append,
            lambda: True,
        )
        messages = [message(offset) for offset in range(3)]
        with pytest.raises(SchemasUnavailable):
            await asyncio.to_thread(following._deliver, messages)
        codec.away = False
        left = messages[following._next_offsets.get((topics.TASKS, 0), 0) :]
        await asyncio.to_thread(following._deliver, left)
        assert following._next_offsets == {(topics.TASKS, 0): 3}
        return [indexed.offset for found in taken for indexed, _ in found.records]

    assert asyncio.run(follow()) == [0, 1, 2]


def test_a_record_that_comes_while_the_follower_looks_for_its_start_is_read() -> None:
    class Appending:
        """A topic of one partition whose records are older than asked for, until one comes with the question."""

        end = 5

        def list_topics(self, topic: str, timeout: float) -> Any:
            return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=[0])})

        def get_watermark_offsets(self, _: TopicPartition, timeout: float) -> tuple[int, int]:
            return 0, self.end

        def offsets_for_times(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
            self.end += 1
            return [TopicPartition(each.topic, each.partition, -1) for each in asked]

    following = BridgeLogFollower(Settings(bootstrap="127.0.0.1:9"), CODEC, since_ms=7, max_records=10)
    consumer: Any = Appending()
    (start,) = following._start_positions(consumer, topics.TASKS, since_ms=7)
    assert start.offset == 5 == consumer.end - 1
