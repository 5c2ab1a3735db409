"""The gateway's producer, without a broker."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas.place import Place
from tentalis.config import Settings
from tentalis.gateway import eventlog
from tentalis.gateway.spool import Spooled
from tentalis.kafka import producer_config
from tests.unit.join_support import CODEC


def test_who_waits_for_a_record_hears_that_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka has no offset for it then. The thread that polls lives on: twice, therefore."""

    def impatient(settings: Settings) -> dict[str, Any]:
        return producer_config(settings) | {"delivery.timeout.ms": 100}

    monkeypatch.setattr(eventlog, "producer_config", impatient)
    log = eventlog.EventLog(Settings(bootstrap="127.0.0.1:9"), "tentalis/test", CODEC)
    try:
        for event_id in ("first", "second"):
            heard: list[KafkaError | Place] = []
            done = threading.Event()

            def said(became: KafkaError | Place, heard: list[Any] = heard, done: threading.Event = done) -> None:
                heard.append(became)
                done.set()

            log.send(Spooled(event_id, "t", b"k", b"v", (), 1), said)
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

    monkeypatch.setattr(eventlog, "Producer", Producer)
    log, done = eventlog.EventLog(Settings(bootstrap="127.0.0.1:9"), "tentalis/test", CODEC), threading.Event()
    try:
        log.send(Spooled("first", "t", b"k", b"v", (), 1), lambda became: done.set())
        assert done.wait(60) and log.fatal == "desynchronized"
    finally:
        log.close()
