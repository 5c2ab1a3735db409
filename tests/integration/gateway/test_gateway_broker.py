"""The gateway on a real broker: acknowledged records, what is served, and the spool held against the log."""

import threading
from pathlib import Path

import pytest

from schemas import topics
from schemas.place import RecordPlace
from tentalis.gateway.recording.event_log import EventLog
from tentalis.gateway.recording.spool import RecordSpool
from tests.support.gateway_lab import ack, wait_for
from tests.support.gateway_lab import lab as gateway_lab
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import Lab

pytestmark = pytest.mark.broker


def test_turns_are_on_the_log_once_with_the_version_that_is_served(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    broker = Lab(kafka.bootstrap, unique)
    policy, stop = unique, threading.Event()
    broker.put(topics.POLICY_ACKS, ack(policy, 4, server_id=unique))
    events = EventLog(broker.settings, "tentalis/gateway/test", broker.codec)
    with gateway_lab(tmp_path / "first") as other:  # two turns for the spool, as a killed gateway would leave them
        other.chat("there already", headers={"X-Session-Id": unique})
        other.chat("not yet there", headers={"X-Session-Id": unique})
        there, missing = other.log.taken
    arrived = threading.Event()
    events.send(there, lambda became: arrived.set() if isinstance(became, RecordPlace) else None)
    assert arrived.wait(60)
    spool = RecordSpool(tmp_path / "spool")
    spool.put(there)
    spool.put(missing)
    spool.close()
    more = {"policies": [{"name": policy, "backend": "local", "models": ["*"]}], "ack_s": 30.0}
    with gateway_lab(tmp_path, events=events, server_id=unique, **more) as gateway:
        gateway.script.adapters.add(f"{policy}@v4")
        follower = threading.Thread(target=gateway.deps.served.follow, args=(broker.settings, broker.codec, stop))
        follower.start()
        try:
            wait_for(lambda: gateway.deps.served.name(unique, policy) == f"{policy}@v4")
            asked = gateway.chat("new", headers={"X-Session-Id": unique})
            assert asked.status_code == 200
            wait_for(lambda: len(list((tmp_path / "spool").glob("*.record"))) == 0)
        finally:
            stop.set()
            follower.join(30)
    events.close()
    found = broker.records(topics.SESSIONS, lambda event: event.session_id == unique)
    ids = [event.session_event_id for event in found]
    assert sorted(ids) == sorted({there.event_id, missing.event_id, asked.headers["x-request-id"]})
    assert {event.messages[-1].content: event.model for event in found}["new"] == f"{policy}@v4"
