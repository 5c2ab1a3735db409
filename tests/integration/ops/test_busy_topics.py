"""Readers of a topic that is written without pause: each reaches the end that the topic had when it began."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from schemas import topics
from tentalis.cli.shared.topic_tail import tail
from tentalis.gateway.api.log import BridgeLogFollower
from tentalis.gateway.api.record_log import LogBatch
from tentalis.kafka.consumer import Follower, Stored
from tentalis.kafka.positions import Start
from tentalis.kafka.producer import Publisher
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab
from tests.support.sessions_support import side

pytestmark = pytest.mark.broker


@pytest.fixture
def busy(kafka: Kafka, unique: str) -> Iterator[Lab]:
    """One partition of `topics.SESSIONS` gets a record every 10 ms."""
    lab = Lab(kafka.bootstrap, unique)
    leaving = threading.Event()
    publisher = Publisher(lab.settings, "busy", lab.codec)

    def write() -> None:
        n = 0
        while not leaving.wait(0.01):
            publisher.send(topics.SESSIONS, side(f"{unique}-{n}", session=f"ann/{unique}", policy=unique))
            n += 1

    lab.put(topics.SESSIONS, side(f"{unique}-first", session=f"ann/{unique}", policy=unique))
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    yield lab
    leaving.set()
    writer.join(30)
    publisher.flush()


def test_a_follower_catches_up(busy: Lab) -> None:
    follower = Follower(busy.settings, topics.SESSIONS)
    read: list[Stored] = []

    def caught_up() -> bool:
        read.extend(follower.poll(0.1))
        return follower.caught_up

    try:
        eventually(caught_up, 20)
    finally:
        follower.close()
    assert any(stored.key == f"ann/{busy.name}" for stored in read)


def test_a_topic_is_printed_to_its_end(busy: Lab) -> None:
    read: list[Stored] = []
    reader = threading.Thread(
        target=lambda: read.extend(tail(busy.settings, topics.SESSIONS, Start(), stop_at_end=True)), daemon=True
    )
    reader.start()
    reader.join(20)
    assert not reader.is_alive()
    assert any(stored.key == f"ann/{busy.name}" for stored in read)


def test_the_index_of_the_bridge_becomes_current(busy: Lab) -> None:
    batches: list[LogBatch] = []
    follower = BridgeLogFollower(busy.settings, busy.codec, since_ms=0, max_records=10_000)

    async def follow() -> None:
        follower.start(batches.append, lambda: False)
        try:
            await asyncio.to_thread(eventually, lambda: follower.stale_reason is None, 20)
        finally:
            await asyncio.to_thread(follower.close)

    asyncio.run(follow())
    assert any(ref.topic == topics.SESSIONS for batch in batches for ref, _ in batch.refs)
