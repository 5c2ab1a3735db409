"""The Faust adapter on a real broker: what is confirmed, what is committed, and what survives."""

import json
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from streams.runtime.processor import stamped
from streams.runtime.startup import check_topics
from streams.runtime.state import OFFSET_HEADER
from tentalis.local.ports import free_port
from tests.support.counting_app import CountingProcessor
from tests.support.http_get import answer_of
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.streams_lab import PARTITIONS, Lab

pytestmark = pytest.mark.broker


@pytest.fixture
def session(kafka: Kafka) -> float:
    """The shortest session timeout that the broker allows, in seconds; 6 is Kafka's default."""
    return 2.0 if kafka.kind == "embedded" else 6.0


@pytest.fixture
def state() -> str:
    """The state store; tests about state use `on_both_stores` instead."""
    return "memory"


# The local stack and the chart keep their state in rocksdb.
on_both_stores = pytest.mark.parametrize("state", [pytest.param("memory", marks=pytest.mark.long), "rocksdb"])


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, state: str) -> Iterator[Lab]:
    lab = Lab(kafka.bootstrap, unique, tmp_path, state=state)
    yield lab
    lab.close()


@on_both_stores
def test_clean_restarts_lose_nothing_and_deliver_nothing_twice(lab: Lab) -> None:
    for _ in range(3):
        lab.produce(200)
        worker = lab.start()
        lab.settled(workers=[worker])
        assert lab.stop(worker) == 0
    assert set(lab.verify().values()) == {1}


@pytest.mark.parametrize(("state", "kills"), [("memory", 7), ("rocksdb", 3)])
def test_kill_9_in_the_middle(lab: Lab, kills: int) -> None:
    chance = random.Random(7)
    for _ in range(kills):
        lab.produce(150)
        worker = lab.start("--instance", "0", "--batch", "10", "--delay", "0.002")
        eventually(lambda worker=worker: lab.owns(worker), 60)
        time.sleep(chance.uniform(0.0, 0.4))  # the moment of the kill is the experiment
        worker.kill()
        worker.wait()
    worker = lab.start("--instance", "0")
    lab.settled(workers=[worker])
    repeated = sum(times - 1 for times in lab.verify().values())
    print(json.dumps({"killed": kills, "outputs_repeated": repeated}))
    assert lab.stop(worker) == 0


@on_both_stores
def test_workers_that_join_leave_stop_and_wake(lab: Lab, session: float) -> None:
    # On disk, partitions move away from a database and back to it, and a zombie keeps its own.
    options = ("--batch", "20", "--delay", "0.001", "--session-timeout", str(session))
    lab.produce(400)
    first = lab.start(*options)
    eventually(lambda: lab.owns(first), 60)
    second = lab.start(*options)
    eventually(lambda: lab.owns(second), 60)
    lab.produce(400)
    first.send_signal(signal.SIGSTOP)  # a zombie: its successor takes over, then it wakes
    lab.produce(400)
    lab.settled(workers=[first, second])
    # Was it in the middle of a flush, it writes behind its successor; then either ends, to read that back.
    first.send_signal(signal.SIGCONT)
    lab.produce(400)
    second.kill()
    third = lab.start(*options)
    lab.produce(400)
    lab.settled(workers=[first, second, third])
    lab.verify()


@on_both_stores
def test_of_two_workers_under_one_name_the_first_ends(lab: Lab) -> None:
    lab.produce(40)
    first = lab.start("--instance", "0")
    lab.settled(workers=[first])
    second = lab.start("--instance", "0")
    assert first.wait(60) == 1
    assert "another member under the name '0'" in lab.log_of(first)
    lab.produce(40)
    lab.settled(workers=[second])
    lab.verify()
    assert lab.stop(second) == 0


@on_both_stores
def test_dead_letters_keep_every_byte(lab: Lab) -> None:
    cases: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]] = [
        (b"k", b"bad:\x00\xff\xfe", [("traceparent", b"\x00\x01"), ("h", b"")]),
        (None, b"bad:no key", []),
        (b"k", None, []),
        (None, None, []),
        (b"\xff\xfe", b"bad:key is no text", []),
        (b"", b"", [("empty", b"")]),
        (b"", b"bad:\xc3\x28", []),
    ]
    for number, (key, value, headers) in enumerate(cases):
        lab.put(lab.topic, value, key, headers=headers, partition=number % PARTITIONS)
    lab.produce(20)
    worker = lab.start()
    lab.settled(workers=[worker])
    letters = lab.read(f"{lab.topic}.dlq")
    got = []
    for message in letters:
        headers = message.headers()
        own = [(name, value) for name, value in headers if not name.startswith("tentalis.dlq.")]
        context = dict(headers)
        assert all(context[name].isascii() for name in context if name.startswith("tentalis.dlq."))
        assert context["tentalis.dlq.original-topic"].decode() == lab.topic
        assert int(context["tentalis.dlq.original-partition"]) == message.partition()
        assert context["tentalis.dlq.consumer-group"].decode() == lab.app
        assert context["tentalis.dlq.error-stage"] in (b"decode", b"process")
        got.append((message.key(), message.value(), own))
    # b"" as value is a count for the key b"": valid input stays out of the dead letters.
    wanted = [case for case in cases if case[1] != b""]
    assert sorted(map(repr, got)) == sorted(map(repr, wanted))
    lab.sent[""] += 1
    assert lab.counted() == dict(lab.sent)
    assert lab.stop(worker) == 0

    lab.uncommit()  # as after SIGKILL between the letters and the commit
    worker = lab.start()
    lab.settled(workers=[worker])
    assert len(lab.read(f"{lab.topic}.dlq")) == len(wanted), "no letter is written twice"
    assert lab.counted() == dict(lab.sent)


@on_both_stores
def test_a_record_that_fails_goes_alone(lab: Lab) -> None:
    lab.produce(20)
    lab.put(lab.topic, b"raise:1", b"key-1")
    lab.put(lab.topic, b"big:1", b"key-2")
    lab.produce(20)
    worker = lab.start("--batch", "100")
    lab.settled(workers=[worker])
    letters = {m.value(): dict(m.headers()) for m in lab.read(f"{lab.topic}.dlq")}
    assert set(letters) == {b"raise:1", b"big:1"}
    raised, large = letters[b"raise:1"], letters[b"big:1"]
    assert raised["tentalis.dlq.error-stage"] == b"process"
    assert raised["tentalis.dlq.error-class"] == b"RuntimeError"
    assert b"does not like" in raised["tentalis.dlq.error-message"]
    assert large["tentalis.dlq.error-stage"] == b"produce"
    assert b"16,777,216" in large["tentalis.dlq.error-message"]
    lab.verify()


def test_too_many_dead_letters_stop_the_application(lab: Lab) -> None:
    bad = 60
    lab.produce(10)
    for number in range(bad):
        lab.producer.produce(lab.topic, b"bad:%d" % number, b"k%d" % number, partition=1)
    assert lab.producer.flush(10) == 0
    worker = lab.start("--dead-run", "10")
    assert worker.wait(60) == 5
    log = lab.log_of(worker)
    assert "11 records in a row could not be processed (limit 10)" in log
    assert f"{lab.topic}[1]@" in log and "no number in it" in log and "Fix the producer" in log
    assert f"run `tentalis groups skip {lab.app} --until-good`" in log
    assert lab.uncommitted() >= bad
    assert lab.read(f"{lab.topic}.dlq") == []

    # In batches that are smaller than the limit, letters are written before the process stops.
    for _ in range(2):
        lab.uncommit()  # as after SIGKILL between the letters and the commit
        assert lab.start("--dead-run", "10", "--batch", "5").wait(60) == 5
        letters = [message.value() for message in lab.read(f"{lab.topic}.dlq")]
        assert 0 < len(letters) < bad
        assert len(letters) == len(set(letters)), "a restart writes no letter again"

    lab.skip_bad()
    worker = lab.start("--dead-run", "10")
    lab.settled(workers=[worker])
    lab.verify()
    assert len(lab.read(f"{lab.topic}.dlq")) == bad + len(letters)


def test_a_producers_clock_is_never_taken_for_time(lab: Lab) -> None:
    lab.produce(20)
    worker = lab.start()
    lab.settled(workers=[worker])
    lab.set_time("CreateTime")
    lab.put(lab.topic, b"n:early", b"key-1")
    assert worker.wait(60) == 7
    log = lab.log_of(worker)
    assert "has the time of its producer's clock (CreateTime)" in log and f"{lab.topic}[" in log
    assert "`tentalis topics apply`" in log
    assert lab.uncommitted() == 1
    lab.verify()


@on_both_stores
def test_a_late_write_of_a_zombie_does_not_win(lab: Lab) -> None:
    lab.produce(60, keys=3)
    worker = lab.start()
    lab.settled(workers=[worker])
    assert lab.stop(worker) == 0
    before = {m.key(): m for m in lab.entries()}
    assert len(before) == 3
    values, tombs = b"key-0", b"key-1"
    lab.put(lab.changelog, stamped(0, b"1"), values, partition=before[values].partition())
    lab.put(lab.changelog, None, tombs, partition=before[tombs].partition(), headers=[(OFFSET_HEADER, b"0")])

    lab.produce(30, keys=3)
    worker = lab.start()
    lab.settled(workers=[worker])
    assert lab.stop(worker) == 0
    lab.verify()
    # Also the last record per key, all that compaction would leave, is the right one again.
    last = {m.key(): m.value() for m in lab.entries()}
    assert {key.decode(): int(value[8:]) for key, value in last.items()} == dict(lab.sent)


def test_a_start_without_one_of_its_topics_ends_with_the_code_for_a_broker_that_differs(lab: Lab) -> None:
    missing = f"{lab.topic}.dlq"
    lab.admin.delete_topics([missing])[missing].result(30)
    eventually(lambda: missing not in lab.admin.list_topics(timeout=10).topics, message="it is still there")
    worker = lab.start()
    assert worker.wait(60) == 3
    assert f"cannot start: {missing} is missing. `tentalis topics apply` creates" in lab.log_of(worker)
    lab.admin.create_topics([NewTopic(missing, PARTITIONS, 1)])[missing].result(30)  # the lab deletes what it made


def test_a_start_waits_for_a_topic_that_is_just_being_created(lab: Lab) -> None:
    missing = f"{lab.topic}.dlq"
    lab.admin.delete_topics([missing])[missing].result(30)
    eventually(lambda: missing not in lab.admin.list_topics(timeout=10).topics, message="it is still there")

    with ThreadPoolExecutor(1) as pool:
        counts = pool.submit(check_topics, CountingProcessor(lab.app, lab.topic), {"bootstrap.servers": lab.bootstrap})
        with pytest.raises(TimeoutError):
            counts.result(1)
        lab.admin.create_topics([NewTopic(missing, PARTITIONS, 1)])[missing].result(30)
        assert counts.result(30) == {lab.topic: PARTITIONS}


def test_a_foreign_changelog_record_ends_every_start_with_7(lab: Lab) -> None:
    lab.produce(10)
    lab.put(lab.changelog, b"hello", b"key-0", partition=1)
    worker = lab.start()
    assert worker.wait(60) == 7
    log = lab.log_of(worker)
    (said,) = [line for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line]
    assert f"ends: {lab.changelog}[1]@0 (key 'key-0')" in said
    assert f"delete {lab.changelog}" in said
    assert "Traceback" not in log and "Event loop is closed" not in log, log


@on_both_stores
def test_a_late_write_of_a_zombie_is_put_right_while_its_successor_lives(lab: Lab) -> None:
    lab.produce(60, keys=3)
    worker = lab.start()
    lab.settled(workers=[worker])
    partition = next(m.partition() for m in lab.entries() if m.key() == b"key-0")
    lab.put(lab.changelog, stamped(0, b"1"), b"key-0", partition=partition)
    lab.produce(30, keys=3)
    assert worker.wait(60) == 1
    assert "another process wrote to it" in lab.log_of(worker)
    worker = lab.start()
    lab.settled(workers=[worker])
    assert lab.stop(worker) == 0
    lab.verify()
    last = {m.key(): m.value() for m in lab.entries()}
    assert {key.decode(): int(value[8:]) for key, value in last.items()} == dict(lab.sent)


@on_both_stores
def test_a_deleted_key_stays_deleted(lab: Lab) -> None:
    lab.produce(8, keys=2)
    lab.put(lab.topic, b"delete:", b"key-1")
    worker = lab.start()
    lab.settled(workers=[worker])
    assert lab.stop(worker) == 0
    assert lab.counted() == {"key-0": 4}
    tombstone = [m for m in lab.entries() if m.key() == b"key-1"][-1]
    assert tombstone.value() is None
    worker = lab.start()
    lab.put(lab.topic, b"n:again", b"key-1")
    lab.settled(workers=[worker])
    assert lab.counted() == {"key-0": 4, "key-1": 1}


@on_both_stores
def test_a_batch_waits_for_an_unavailable_service_and_keeps_its_partition(
    lab: Lab, session: float, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    for partition in range(PARTITIONS):
        lab.put(lab.topic, b"wait:", f"w{partition}".encode(), partition=partition)
    port = free_port()
    options = ("--gate", str(gate), "--session-timeout", str(session), "--stall-limit", "5")
    worker = lab.start(*options, "--metrics-port", str(port))
    eventually(lambda: lab.owns(worker), 60)
    # Longer than the session timeout and the watchdog's limit: heartbeats go on, and waiting is not standing still.
    waited = time.monotonic() + max(session, 5.0) + 1.5
    eventually(lambda: time.monotonic() > waited, 60)
    assert lab.owns(worker)
    assert lab.log_of(worker).count("owns partitions") == 1
    assert lab.uncommitted() == PARTITIONS
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    assert f'tentalis_stream_retries_total{{app="{lab.app}"}}' in metrics
    assert f'tentalis_stream_lag_records{{app="{lab.app}",partition="0",topic="{lab.topic}"}} 1.0' in metrics
    gate.touch()
    lab.settled(workers=[worker])
    assert lab.read(f"{lab.topic}.dlq") == []
    assert lab.stop(worker) == 0


def test_the_markers_of_transactions_are_no_lag(lab: Lab) -> None:
    producer = Producer({"bootstrap.servers": lab.bootstrap, "transactional.id": lab.app})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(lab.topic, b"n:0", b"k", partition=0)
    producer.commit_transaction(60)
    port = free_port()
    worker = lab.start("--metrics-port", str(port))
    eventually(lambda: lab.owns(worker), 60)
    done = f'tentalis_stream_lag_records{{app="{lab.app}",partition="0",topic="{lab.topic}"}} 0.0'

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    eventually(lambda: done in metrics(), 60, message=metrics)
    eventually(lambda: lab.uncommitted() == 1, 60, message="all but the marker, which nobody can acknowledge")
    assert lab.stop(worker) == 0


def test_ticks_and_health(lab: Lab) -> None:
    port = free_port()
    worker = lab.start("--ticking", "--metrics-port", str(port))

    eventually(lambda: answer_of(port, "/healthz")[0] == 200, 60)
    eventually(lambda: answer_of(port, "/readyz")[0] == 200, 60)

    def ticked() -> bool:
        found = lab.read(f"{lab.topic}.ticks")
        return {m.partition() for m in found} == set(range(PARTITIONS)) and len(found) >= 2 * PARTITIONS

    eventually(ticked, 60)
    assert all(m.value() == str(m.partition()).encode() for m in lab.read(f"{lab.topic}.ticks"))
    assert lab.stop(worker) == 0
