"""Processes that see a topic being lost or resized, on a real broker."""

import threading

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tentalis.kafka import topic_watch
from tentalis.kafka.config import client_config
from tentalis.kafka.identity import PartitionsChanged, TopicLost
from tentalis.kafka.topic_client import TopicClient
from tentalis.kafka.topic_watch import TopicWatch, ending_on_changes
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka, ensure_topics, eventually

pytestmark = pytest.mark.broker


def seen(watch: TopicWatch) -> bool:
    try:
        watch.check()
    except (TopicLost, PartitionsChanged):
        return True
    return False


def created(admin: AdminClient, name: str) -> None:
    for future in admin.create_topics([NewTopic(name, 2, 1)]).values():
        future.result(30)
    eventually(lambda: name in admin.list_topics(timeout=10).topics, 30)


def test_a_running_process_sees_new_partitions_and_a_new_topic(
    kafka: Kafka, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watch, "LOOK_S", 0.2)
    settings = Settings(bootstrap=kafka.bootstrap)
    ensure_topics(settings)  # with the record of topic ids, with which a process compares at its start
    admin = AdminClient(client_config(settings))
    grown, replaced = f"{unique}-grown", f"{unique}-replaced"
    for name in (grown, replaced):
        created(admin, name)
    looks = threading.Semaphore(0)
    look = TopicWatch._look

    def counted(watch: TopicWatch, client: TopicClient) -> None:
        look(watch, client)
        looks.release()

    monkeypatch.setattr(TopicWatch, "_look", counted)
    growing, replacing = TopicWatch(settings, [grown], ""), TopicWatch(settings, [replaced], "")
    for _ in range(6):
        assert looks.acquire(timeout=30)
    assert not seen(growing) and not seen(replacing)
    for future in admin.create_partitions([NewPartitions(grown, 3)]).values():
        future.result(30)
    eventually(lambda: seen(growing), 30)
    with pytest.raises(PartitionsChanged, match=f"{grown} had 2 partitions and has 3"):
        growing.check()
    for future in admin.delete_topics([replaced]).values():
        future.result(30)
    eventually(lambda: seen(replacing), 30)
    with pytest.raises(TopicLost, match=replaced):
        replacing.check()
    with pytest.raises(PartitionsChanged):
        # The first look of a process takes the topics as they are.
        ending_on_changes(settings, [grown], lambda stop: _grow_and_wait(admin, grown, stop))(threading.Event())


def _grow_and_wait(admin: AdminClient, name: str, stop: threading.Event) -> None:
    stop.wait(2.0)
    for future in admin.create_partitions([NewPartitions(name, 4)]).values():
        future.result(30)
    assert stop.wait(30), "the process was not asked to end"
