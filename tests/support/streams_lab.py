"""Topics, workers and readings for the tests of `streams.runtime.worker` on a real broker."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from schemas.wire.codec import Codec
from streams.runtime.processor import payload_of
from streams.runtime.state import ChangelogFold, entry_of
from streams.runtime.worker import ensure_changelog
from tentalis.kafka.consumer import Stored
from tentalis.kafka.identity import SOURCES_KEY
from tentalis.kafka.producer import Publisher
from tentalis.ops.groups.skip import send_skip_letter
from tentalis.service.settings import Settings
from tests.support.fork_server import ForkedProcess
from tests.support.kafka_fixture import eventually

PARTITIONS = 4
_MOVING = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.NOT_COORDINATOR)


@contextmanager
def _not_yet() -> Iterator[None]:
    """The coordinator may still be loading, a new partition may have no leader: "not yet" to `eventually`."""
    try:
        yield
    except KafkaException as error:
        cause = error.args[0]
        assert not cause.retriable() and cause.code() not in _MOVING, str(error)
        raise


class Lab:
    """One input topic with its output, dead-letter and tick topics, and workers of one application, with their state
    in memory or on disk."""

    def __init__(
        self,
        bootstrap: str,
        name: str,
        folder: Path,
        *,
        state: str = "memory",
        out_config: dict[str, str] | None = None,
    ) -> None:
        self.bootstrap = bootstrap
        self.state = state
        self.topic = name
        self.app = f"{name}-app"
        self.folder = folder
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        configs = {
            name: {"message.timestamp.type": "LogAppendTime"},
            f"{name}.out": out_config or {},
            f"{name}.dlq": {},
            f"{name}.ticks": {},
        }
        new = [NewTopic(topic, PARTITIONS, 1, config=config) for topic, config in configs.items()]
        for future in self.admin.create_topics(new).values():
            future.result(30)
        self.changelog = ensure_changelog(bootstrap, self.app, "state", PARTITIONS)
        self.producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "partitioner": "murmur2_random",
                "compression.type": "zstd",
                "linger.ms": 2,
                "message.max.bytes": 16 * 2**20,
            }
        )
        self._group = Consumer({"bootstrap.servers": bootstrap, "group.id": self.app})
        self.sent: Counter[str] = Counter()
        self._serial = 0
        self._workers: list[subprocess.Popen[bytes]] = []

    def produce(self, count: int, keys: int = 20) -> None:
        """`count` numbered records over `keys` keys, confirmed."""
        for _ in range(count):
            key = f"key-{self._serial % keys}"
            self.producer.produce(self.topic, f"n:{self._serial}".encode(), key.encode())
            self.sent[key] += 1
            self._serial += 1
        assert self.producer.flush(30) == 0

    def put(self, topic: str, value: bytes | None, key: bytes | None = None, **options: Any) -> None:
        """One record, confirmed."""
        self.producer.produce(topic, value, key, **options)
        assert self.producer.flush(30) == 0

    def set_time(self, kind: str) -> None:
        """Sets the timestamps of the input topic from now on: LogAppendTime or CreateTime. Returns once the broker says
        so: the controller has it before the broker of a partition follows."""
        entry = ConfigEntry("message.timestamp.type", kind, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result(30)

        def is_set() -> bool:
            (described,) = self.admin.describe_configs([ConfigResource(ResourceType.TOPIC, self.topic)]).values()
            return bool(described.result(30)["message.timestamp.type"].value == kind)

        eventually(is_set)
        time.sleep(0.5)  # what the broker says and what it does are two steps

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        """A worker process."""
        command = ["-m", "tests.support.counting_app", "--bootstrap", self.bootstrap, "--app", self.app]
        command += ["--topic", self.topic, "--state-dir", str(self.folder), "--state", self.state, *options]
        log = self.folder / f"worker-{len(self._workers)}.log"
        worker = ForkedProcess(command, os.environ | {"OMP_NUM_THREADS": "1"}, log)
        self._workers.append(worker)
        return worker

    def log_of(self, worker: "subprocess.Popen[bytes]") -> str:
        """Returns the log of a worker so far."""
        return (self.folder / f"worker-{self._workers.index(worker)}.log").read_text()

    def stop(self, worker: "subprocess.Popen[bytes]") -> int:
        """SIGTERM; the exit code."""
        worker.send_signal(signal.SIGTERM)
        return worker.wait(30)

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
                worker.wait()
        topics = [self.topic, *(f"{self.topic}.{kind}" for kind in ("out", "dlq", "ticks")), self.changelog]
        for future in self.admin.delete_topics(topics).values():
            future.result(30)
        self._group.close()

    def owns(self, worker: "subprocess.Popen[bytes]") -> bool:
        """Returns True if the worker got its partitions."""
        assert worker.poll() is None, f"the worker ended with {worker.returncode}:\n{self.log_of(worker)[-3000:]}"
        return "owns partitions" in self.log_of(worker)

    def read(self, topic: str) -> list[Message]:
        """Everything on a topic."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "lab",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
            }
        )
        found: list[Message] = []
        try:
            ends = {p: self._range(consumer, TopicPartition(topic, p)) for p in range(PARTITIONS)}
            todo = {p: high for p, (low, high) in ends.items() if low < high}
            consumer.assign([TopicPartition(topic, p, 0) for p in todo])
            while todo:
                for message in consumer.consume(1000, 0.2):
                    assert message.error() is None, message.error()
                    found.append(message)
                    if message.offset() + 1 >= todo.get(message.partition(), 1 << 62):
                        del todo[message.partition()]
        finally:
            consumer.close()
        return found

    def _range(self, consumer: Consumer, place: TopicPartition) -> tuple[int, int]:
        def asked() -> tuple[int, int]:
            with _not_yet():
                low, high = consumer.get_watermark_offsets(place, 10)
            return low, high

        return eventually(asked, 60, 0.1, f"{place} has no leader")

    def uncommitted(self) -> int:
        """Input records that the application has not committed."""
        # Not AdminClient.list_consumer_group_offsets: librdkafka 2.16 crashes (rd_kafka_cgrp_op, no group) when the
        # coordinator answers "not yet".
        places = [TopicPartition(self.topic, p) for p in range(PARTITIONS)]
        with _not_yet():
            committed = {place.partition: max(place.offset, 0) for place in self._group.committed(places, 10)}
            return sum(self._group.get_watermark_offsets(place, 10)[1] - committed[place.partition] for place in places)

    def entries(self) -> list[Message]:
        """The records of the state on the changelog, without the runtime's own."""
        return [message for message in self.read(self.changelog) if message.key() != SOURCES_KEY.encode()]

    def uncommit(self) -> None:
        """Sets the committed offsets back to the beginning."""
        places = [TopicPartition(self.topic, p, 0) for p in range(PARTITIONS)]

        def committed() -> bool:
            try:
                self._group.commit(offsets=places, asynchronous=False)
            except KafkaException as error:  # the worker has not left the group yet
                assert error.args[0].code() != KafkaError.UNKNOWN_MEMBER_ID, str(error)
                raise
            return True

        eventually(committed, 30)

    def skip_bad(self) -> None:
        """Writes the letters of `tentalis groups skip` for all bad records."""
        bad = [Stored.of(m) for m in self.read(self.topic) if m.value().startswith(b"bad:")]
        publisher = Publisher(Settings(bootstrap=self.bootstrap), "test", Codec())
        for stored in bad:
            send_skip_letter(publisher, self.app, stored, "a test", "bad")
        publisher.flush()

    def counted(self) -> dict[str, int]:
        """The state as the changelog tells it."""
        folds = [ChangelogFold() for _ in range(PARTITIONS)]
        for m in self.entries():
            folds[m.partition()].add(
                entry_of(self.changelog, m.partition(), m.offset(), m.key(), m.value(), m.headers() or ())
            )
        return {key: int(payload_of(value)) for fold in folds for key, value in fold.state().items()}

    def settled(self, timeout: float = 60.0, workers: Sequence["subprocess.Popen[bytes]"] = ()) -> None:
        """Waits until everything sent is committed."""
        eventually(
            lambda: self.uncommitted() == 0,
            timeout,
            0.1,
            lambda: "not everything is committed\n" + "\n".join(self.log_of(w)[-3000:] for w in workers),
        )

    def verify(self) -> Counter[bytes]:
        """Nothing lost, nothing counted twice. Returns how often each output was written."""
        assert self.counted() == dict(self.sent)
        outputs = Counter(m.value() for m in self.read(f"{self.topic}.out"))
        assert set(outputs) == {f"n:{i}".encode() for i in range(self._serial)}
        return outputs
