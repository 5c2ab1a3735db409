"""The broker that tests have for themselves, one after the other."""

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.kafka_fixture import eventually
from tests.support.kept_broker import KeptBroker

pytestmark = pytest.mark.broker

TOPIC = "left"


def test_nothing_of_the_test_before_is_left(kept_broker: KeptBroker) -> None:
    """That left a topic, an open transaction, and a group with an offset and a member that did not leave."""
    broker = kept_broker.lent()
    at = {"bootstrap.servers": broker.bootstrap}
    group = at | {"group.id": TOPIC, "session.timeout.ms": 300_000, "auto.offset.reset": "earliest"}
    admin = AdminClient(at)

    def topics() -> set[str]:
        return {*admin.list_topics(timeout=30).topics}

    def groups() -> list[str]:
        return [each.group_id for each in admin.list_consumer_groups().result(30).valid]

    def joined(instance: str) -> Consumer:
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(30)
        eventually(lambda: TOPIC in topics())
        consumer = Consumer(group | {"group.instance.id": instance, "isolation.level": "read_uncommitted"})
        consumer.subscribe([TOPIC])
        eventually(lambda: consumer.poll(0.5) is None and consumer.assignment(), 60)
        return consumer

    first = joined("first")
    producer = Producer(at | {"transactional.id": TOPIC})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(TOPIC, b"1")
    producer.flush(30)
    del producer  # its transaction stays open
    first.commit(offsets=[TopicPartition(TOPIC, 0, 1)], asynchronous=False)
    assert groups() == [TOPIC]
    first.close()  # a static member stays

    kept_broker.take_back()
    assert kept_broker.lent() is broker and topics() == set() and groups() == []
    second = joined("second")
    (committed,) = second.committed([TopicPartition(TOPIC, 0)], timeout=30)
    assert committed.offset < 0 and second.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=30) == (0, 0)
    second.close()
    kept_broker.take_back()
