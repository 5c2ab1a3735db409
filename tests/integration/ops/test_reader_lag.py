"""The records that a process has not read yet, as its client knows them."""

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tentalis.kafka.consumer import Follower, GroupConsumer
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
