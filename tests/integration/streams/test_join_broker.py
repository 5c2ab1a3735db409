"""The join on a real broker, killed again and again: it writes what a fold of the same halves log says, to the byte."""

import hashlib
import random
import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from schemas import topics
from schemas.records import HintKind, Outcome, Record, Source
from streams.apps.join.processor import APP_ID, JoinProcessor
from streams.runtime.processor import LogRecord
from tentalis.kafka.codec import make_codec
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support.http_get import answer_of
from tests.support.join_support import drive, head, hint, open_, sample, score
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import ensure_topics, eventually

pytestmark = pytest.mark.broker

TASKS, KILLS = 80, 4


def produce(settings: Settings, chance: random.Random, name: str) -> set[str]:
    """Tasks of every fate, their halves shuffled; the keys of the outcomes that each sample must get."""
    publisher = Publisher(settings, "test", make_codec(settings))
    records: list[Record] = []
    now, samples = now_ms(), set()
    for number in range(TASKS):
        task = head(f"{name}-{number}", 1 + number % 3, deadline_ms=4000, opd_window_ms=1500)
        samples |= {f"{task.task_id}/{index}" for index in range(task.n_samples)}
        records.append(open_(task, now))
        for index in range(task.n_samples):
            of, fate = sample(task, index), chance.random()
            if fate < 0.9:
                records.append(score(of, chance.choice([1.0, -0.5, None]), at=now))
            if fate > 0.1:
                kind = chance.choice([HintKind.ACCEPTED, HintKind.NONE])
                records.append(hint(of, kind, at=now))
            if fate < 0.05:
                records += [score(sample(task, index, "r2"), at=now), hint(of, source=Source.OPERATOR, at=now)]
    chance.shuffle(records)
    for record in [*records, *chance.sample(records, 30)]:
        publisher.send(topics.HALVES, record)
    publisher.flush()
    return samples


def written(settings: Settings) -> tuple[list[Stored], dict[tuple[str, str], set[bytes]]]:
    """All writes to rollouts and outcomes, and per key the different values."""
    stored = [record for topic in (topics.ROLLOUTS, topics.OUTCOMES) for record in read_to_end(settings, topic)]
    values: dict[tuple[str, str], set[bytes]] = {}
    for record in stored:
        assert record.key is not None and record.value is not None
        values.setdefault((record.topic, record.key), set()).add(record.value)
    return stored, values


def folded(settings: Settings) -> dict[tuple[str, str], set[bytes]]:
    """Returns the output of an undisturbed fold of the halves log."""
    processor = JoinProcessor(make_codec(settings))
    values: dict[tuple[str, str], set[bytes]] = {}
    for stored in read_to_end(settings, topics.HALVES):
        if stored.partition not in processor.partitions:
            processor.restore(stored.partition, {})
        place = (stored.topic, stored.partition, stored.offset, stored.timestamp)
        record = LogRecord(*place, stored.key, stored.value or b"", tombstone=stored.value is None)
        for output in drive(processor.process(stored.partition, [record])).outputs:
            values.setdefault((output.topic, output.key), set()).add(output.value)
    return values


def progresses(settings: Settings, worker: JoinWorker) -> None:
    """Waits until a worker has written something."""
    before = len(written(settings)[0])
    eventually(lambda: len(written(settings)[0]) > before, 60, message=lambda: worker.log.read_text()[-2000:])


def test_killed_at_any_moment_it_writes_what_the_log_says(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    chance = random.Random(11)
    samples: set[str] = set()
    for number in range(KILLS):
        samples |= produce(settings, chance, f"task-{number}")
        # In turns: whoever has its state in memory writes behind the back of whoever has it on disk.
        state = ("rocksdb", "memory", "rocksdb", "rocksdb")[number % 4]
        workers.append(JoinWorker(str(settings.bootstrap), tmp_path, f"killed-{number}", "--state", state))
        progresses(settings, workers[-1])
        time.sleep(chance.uniform(0.0, 0.3))  # the moment of the kill is the experiment
        workers[-1].end(kill=True)
    workers.append(JoinWorker(str(settings.bootstrap), tmp_path, "last", "--state", "rocksdb"))

    def complete() -> bool:
        return samples <= {key for topic, key in written(settings)[1] if topic == topics.OUTCOMES}

    eventually(complete, 60, interval=0.5, message=lambda: workers[-1].log.read_text()[-2000:])
    # Those before it may have written everything while it was still starting.
    eventually(lambda: "owns partitions" in workers[-1].log.read_text(), 60)
    assert workers[-1].end() == 0
    stored, values = written(settings)
    assert values == folded(settings)
    assert all(len(different) == 1 for different in values.values()), "a key has one value for ever"
    print({"tasks": KILLS * TASKS, "keys": len(values), "writes": len(stored), "kills": KILLS})


def digests(values: dict[tuple[str, str], set[bytes]]) -> dict[tuple[str, str], str]:
    """The digest of the one value of each key."""
    assert all(len(different) == 1 for different in values.values()), "a key has one value for ever"
    return {key: hashlib.sha256(*different).hexdigest() for key, different in values.items()}


def as_if_never_run(settings: Settings) -> None:
    """Takes all from the broker that a join has made of the halves log: offsets, state, outputs and ids."""
    admin = AdminClient(client_config(settings))
    made = [topics.ROLLOUTS, topics.OUTCOMES, topics.changelog(APP_ID, "state"), topics.TOPIC_IDS]

    def group_deleted() -> bool:
        try:
            admin.delete_consumer_groups([APP_ID])[APP_ID].result(30)
        except KafkaException as error:  # a member that has just ended may not have left yet
            assert error.args[0].code() != KafkaError.NON_EMPTY_GROUP, error
            raise
        return True

    eventually(group_deleted, 60, 0.5)
    for future in admin.delete_topics(made).values():
        future.result(30)
    eventually(lambda: not admin.list_topics(timeout=10).topics.keys() & set(made), 60)
    ensure_topics(settings)


def test_one_worker_and_three_make_the_same_of_a_log(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    every = set(range(topics.table().keyed_partitions))
    for name in ("a", "b", "c"):
        # Members that leave their group when they end: it can be deleted then.
        workers.append(JoinWorker(str(settings.bootstrap), tmp_path, name, static=False))
    owned: list[set[int]] = []

    def shared() -> bool:
        owned[:] = [worker.owned() for worker in workers]
        return all(owned) and set.union(*owned) == every and sum(map(len, owned)) == len(every)

    eventually(shared, 90, message=lambda: f"{owned}\n" + workers[0].log.read_text()[-2000:])
    samples = produce(settings, random.Random(5), "task")

    def complete() -> bool:
        return samples <= {key for topic, key in written(settings)[1] if topic == topics.OUTCOMES}

    eventually(complete, 60, interval=0.5, message=lambda: workers[0].log.read_text()[-2000:])
    assert shared(), "all three took part"
    assert [worker.end() for worker in workers] == [0, 0, 0]
    by_three = digests(written(settings)[1])

    as_if_never_run(settings)
    workers.append(JoinWorker(str(settings.bootstrap), tmp_path, "alone"))
    eventually(complete, 60, interval=0.5, message=lambda: workers[-1].log.read_text()[-2000:])
    assert workers[-1].end() == 0
    assert workers[-1].owned() == every
    assert digests(written(settings)[1]) == by_three == digests(folded(settings))


@pytest.mark.parametrize("state", ["memory", pytest.param("rocksdb", marks=pytest.mark.long)])
def test_at_its_bound_the_input_waits_and_goes_on_where_there_is_room(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path, state: str
) -> None:
    publisher, codec = Publisher(settings, "test", make_codec(settings)), make_codec(settings)
    now, tasks = now_ms(), [head(f"bound-{number}", opd=None, deadline_ms=3_600_000) for number in range(60)]
    for task in tasks:
        publisher.send(topics.HALVES, open_(task, now))
    publisher.flush()

    def kinds() -> list[str]:
        outcomes = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
        mine = [outcome for outcome in outcomes if isinstance(outcome, Outcome) and outcome.key.startswith("bound-")]
        return [outcome.kind.value for outcome in mine]

    port = free_port()
    options = ("--max-open-tasks", "20", "--metrics-port", str(port), "--state", state)
    workers.append(JoinWorker(str(settings.bootstrap), tmp_path, "bounded", *options))
    log = workers[-1].log
    eventually(lambda: "all partitions are paused" in log.read_text(), 60, message=lambda: log.read_text()[-2000:])
    paused = float(topics.table().keyed_partitions)
    assert f"tentalis_join_paused_partitions {paused}" in answer_of(port, "/metrics")[1]
    assert answer_of(port, "/healthz")[0] == 200
    status, reason = answer_of(port, "/readyz")
    assert status == 503 and "the bound is 20 tasks" in reason
    for task in tasks:
        publisher.send(topics.HALVES, score(sample(task), at=now))
    publisher.flush()
    assert workers[-1].end() == 0
    assert kinds() == [], "nothing is evicted, and what would make room lies behind"
    workers.append(JoinWorker(str(settings.bootstrap), tmp_path, "roomy", "--max-open-tasks", "100", "--state", state))

    eventually(lambda: kinds() == ["rl"] * 60, 60, 0.5, lambda: workers[-1].log.read_text()[-2000:])
