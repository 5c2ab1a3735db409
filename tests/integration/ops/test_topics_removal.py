"""Records are removed only when that is asked for twice, and what is lost with them is said first."""

import json
import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner, Result

from schemas import topics
from tentalis.cli.main import app
from tentalis.kafka.admin import Description, PartitionState
from tentalis.kafka.removal import lost
from tests.support.kafka_fixture import Kafka

pytestmark = pytest.mark.broker


def described(name: str) -> Description:
    return Description(name, True, (), (PartitionState(0, 1, (1,), (1,), 0, 10),), {})


def test_what_is_lost_names_readers_state_and_replays() -> None:
    said = " ".join(lost(described(topics.TASKS), 10, {"tentalis-scoring": 4, "tentalis-worker-chat": 0}, whole=False))
    assert "scoring reads it" in said and "worker reads it" in said and "trainer" not in said
    assert "4 records that tentalis-scoring has not processed" in said and "worker-chat" not in said
    assert "replayed" not in said and "anew" not in said
    assert "can no longer be replayed" in " ".join(lost(described(topics.BATCHES), 10, {}, whole=True))
    changelog = next(
        name
        for name in topics.with_changelogs(topics.table(), ["tentalis-join-state-changelog"]).topics
        if "changelog" in name
    )
    assert "the state of join" in " ".join(lost(described(changelog), 10, {}, whole=True))


@pytest.fixture
def name(kafka: Kafka, unique: str) -> str:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(unique, 1, 1)])[unique].result(30)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    now = int(time.time() * 1000)
    for age_h in (48, 36, 2, 1):
        producer.produce(unique, b"value", timestamp=now - age_h * 3_600_000)
    assert producer.flush(30) == 0
    return unique


def run(kafka: Kafka, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["topics", *arguments, "--bootstrap-server", kafka.bootstrap])


def offsets(kafka: Kafka, topic: str) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "offsets"})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=15)
    finally:
        consumer.close()
    return low, high


def test_trim_and_delete_change_nothing_until_applied(kafka: Kafka, name: str) -> None:
    shown = run(kafka, "trim", name, "--before", "1d", "-o", "json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["records"] == 2
    assert run(kafka, "delete", name).exit_code == 0
    assert run(kafka, "delete", name, "--yes", "--dry-run").exit_code == 0
    assert offsets(kafka, name) == (0, 4)
    assert run(kafka, "trim", name, "--before", "1d", "--yes").exit_code == 0
    assert offsets(kafka, name) == (2, 4)
    assert run(kafka, "delete", name, "--yes").exit_code == 0
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    deadline = time.monotonic() + 20
    while name in admin.list_topics(timeout=15).topics:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    gone = run(kafka, "delete", name)
    assert gone.exit_code == 3 and f"no topic {name}" in gone.stderr


def test_a_compacted_topic_is_not_trimmed(kafka: Kafka, unique: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(unique, 1, 1, config={"cleanup.policy": "compact"})])[unique].result(30)
    refused = run(kafka, "trim", unique, "--before", "1d", "--yes")
    assert refused.exit_code == 1 and "topics delete" in refused.stderr
