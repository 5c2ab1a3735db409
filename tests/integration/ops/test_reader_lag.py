"""The records that a process has not read yet, as its client knows them."""

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from schemas import topics
from tentalis.kafka.consumer import Follower, GroupConsumer, Stored
from tentalis.kafka.lag import consumer_lags
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.topology import CONTROL_GROUP
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.groups.process import read_groups
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka, eventually

pytestmark = pytest.mark.broker


def test_lag_counts_what_was_not_read(kafka: Kafka, unique: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(unique, 1, 1)])[unique].result(30)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})

    def write(count: int) -> None:
        for _ in range(count):
            producer.produce(unique, b"value")
        assert producer.flush(30) == 0

    settings, place = Settings(bootstrap=kafka.bootstrap), (unique, "0")
    member, follower = GroupConsumer(settings, unique, [unique]), Follower(settings, unique)
    try:
        assert member.lag() == {}, "it owns nothing yet"
        write(4)
        read: list[object] = []
        deadline = time.monotonic() + 30
        while not read and time.monotonic() < deadline:
            read += member.poll(0.5, 1)
        assert member.lag() == {place: 3.0}
        eventually(lambda: follower.poll(0.1) is not None and follower.lag() == {place: 0.0}, 30)
        write(2)
        eventually(lambda: follower.lag() == {place: 2.0}, 30)
        eventually(lambda: member.lag() == {place: 5.0}, 30)
    finally:
        member.close()
        follower.close()


def test_the_marker_of_a_transaction_is_no_lag(own_broker: EmbeddedBroker) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap)
    client = {"bootstrap.servers": own_broker.bootstrap}
    admin = AdminClient(client)
    for made in admin.create_topics([NewTopic(name, 1, 1) for name in topics.CONTROL]).values():
        made.result(30)
    producer = Producer(client | {"transactional.id": "marker"})
    producer.init_transactions(30)
    consumer = GroupConsumer(settings, CONTROL_GROUP, topics.CONTROL)
    read: list[Stored] = []
    for count in (1, 2):
        producer.begin_transaction()
        producer.produce(topics.RUNS, b"{}", b"run")
        producer.commit_transaction(30)
        if count == 1:
            eventually(lambda: read.extend(consumer.poll(0.5)) or read, 30)
            consumer.commit(read)
            assert end_offsets(settings, topics.RUNS)[0] == 2 and read[-1].offset == 0
            assert consumer_lags(settings, {CONTROL_GROUP: topics.CONTROL}) == {CONTROL_GROUP: 0}
            assert read_groups(settings, [CONTROL_GROUP])[0].records == 0
    consumer.close()
    assert consumer_lags(settings, {CONTROL_GROUP: topics.CONTROL})[CONTROL_GROUP] > 0
    assert read_groups(settings, [CONTROL_GROUP])[0].records > 0
