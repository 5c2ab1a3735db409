"""A real embedded broker: what was acknowledged survives `kill -9`, and the storage is formatted once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tentalis.local.broker import BrokerError, EmbeddedBroker, metadata_ready
from tentalis.local.ports import free_port
from tests.support.kafka_fixture import Kafka, eventually

pytestmark = pytest.mark.broker
QUIET = {"log_level": 0}  # lost connections are expected here


def create_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    lost: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "message.max.bytes": 20_000_000, **QUIET})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: lost.append(error) if error else None)
    assert producer.flush(60) == 0
    assert not lost


def read(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False, **QUIET})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes] = []

    def enough() -> bool:
        values.extend(message.value() for message in consumer.consume(1000, 0.5) if not message.error())
        return len(values) >= count

    eventually(enough, 60, message=f"{topic} has not {count} records")
    consumer.close()
    return values


def test_records_come_back_from_the_broker_of_the_session(kafka: Kafka, unique: str) -> None:
    create_topic(kafka.bootstrap, unique)
    values = [f"value {number}".encode() for number in range(1000)]
    produce(kafka.bootstrap, unique, values)
    assert read(kafka.bootstrap, unique, 1000) == values


@pytest.mark.chaos
def test_what_was_acknowledged_survives_kill_9(own_broker: EmbeddedBroker) -> None:
    create_topic(own_broker.bootstrap, "kept")
    expected: list[bytes] = []
    identity = (own_broker.data_dir / "log" / "meta.properties").read_text()
    for round_ in range(2):
        values = [f"{round_}/{number}".encode() for number in range(500)]
        produce(own_broker.bootstrap, "kept", values)
        expected += values
        own_broker.kill()
        own_broker.start()
        own_broker.wait_ready()
        assert read(own_broker.bootstrap, "kept", len(expected)) == expected
    assert (own_broker.data_dir / "log" / "meta.properties").read_text() == identity


def test_topics_are_not_made_by_mistake_and_large_records_have_a_limit(kafka: Kafka, unique: str) -> None:
    if kafka.broker is None:
        pytest.skip("the settings of the embedded broker, and this one is " + kafka.kind)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, **QUIET})
    assert unique not in admin.list_topics(timeout=30).topics
    create_topic(kafka.bootstrap, unique)
    produce(kafka.bootstrap, unique, [b"x" * (kafka.broker.record_limit - 1000)])
    with pytest.raises(AssertionError):
        produce(kafka.bootstrap, unique, [b"x" * (kafka.broker.record_limit + 1)])


def test_a_second_start_of_a_running_broker_is_refused(kafka: Kafka) -> None:
    if kafka.broker is None:
        pytest.skip("needs the embedded broker, and this one is " + kafka.kind)
    with pytest.raises(BrokerError, match="already runs"):
        kafka.broker.start()


def test_the_module_becomes_the_broker_and_ends_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    log = (tmp_path / "out").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "tentalis.local.broker", "--data-dir", str(tmp_path / "data"), "--port", str(port)],
        stdout=log,
        stderr=log,
    )
    try:
        eventually(lambda: metadata_ready(f"127.0.0.1:{port}"), 60, message="the broker did not come up")
        assert Path(f"/proc/{process.pid}/exe").readlink().name == "java"
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert ".jsa" in mapped, f"it does not use the archive of its classes: {(tmp_path / 'out').read_text()}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()
    log.seek(0)
    assert "Kafka Server started" in log.read()


def test_a_taken_port_ends_the_module_with_an_explanation(kafka: Kafka, tmp_path: Path) -> None:
    port = int(kafka.bootstrap.rpartition(":")[2])
    command = [sys.executable, "-m", "tentalis.local.broker", "--data-dir", str(tmp_path / "data"), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"error: port {port} of the Kafka broker is taken" in done.stderr


def test_a_half_formatted_folder_is_formatted_afresh_and_a_foreign_one_is_left_alone(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, free_port(), free_port())
    (tmp_path / "log.formatting").mkdir()
    (tmp_path / "log.formatting" / "bootstrap.checkpoint").write_bytes(b"half")
    broker.prepare()
    assert "cluster.id=" in (tmp_path / "log" / "meta.properties").read_text()
    assert not (tmp_path / "log.formatting").exists()

    foreign = EmbeddedBroker(tmp_path / "other", free_port(), free_port())
    (tmp_path / "other" / "log").mkdir(parents=True)
    (tmp_path / "other" / "log" / "thesis.txt").write_text("the only copy")
    with pytest.raises(BrokerError, match=r"no meta\.properties"):
        foreign.prepare()
    assert (tmp_path / "other" / "log" / "thesis.txt").read_text() == "the only copy"
