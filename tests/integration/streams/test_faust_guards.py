"""Each guard against a defect of Faust, on a real broker: with it, and without it (`tests.support.unguarded`).

What a test expects without the guard is the defect; docs/decisions/0002-streams-on-faust.md describes and links it."""

import asyncio
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaProducer

from streams.runtime.dlq import Produce
from streams.runtime.settings import StreamSettings, producer_settings
from streams.runtime.sink import KafkaSink
from tentalis.local.ports import free_port
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.streams_lab import Lab

pytestmark = pytest.mark.broker

guarded = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path) -> Iterator[Lab]:
    # Outputs of more than 20 kB are refused.
    lab = Lab(kafka.bootstrap, unique, tmp_path, out_config={"max.message.bytes": "20000"})
    yield lab
    lab.close()


def start(lab: Lab, guarded: bool, guard: str, *options: str) -> "subprocess.Popen[bytes]":
    """A worker with or without a guard."""
    return lab.start(*options, *(() if guarded else ("--without", guard)))


def outputs(lab: Lab) -> Counter[bytes]:
    """Counts how often each output was written."""
    return Counter(message.value() or b"" for message in lab.read(f"{lab.topic}.out"))


def put(lab: Lab, *values: bytes) -> None:
    """Records that lie one behind the other on one partition."""
    for value in values:
        lab.producer.produce(lab.topic, value, b"k", partition=0)
    assert lab.producer.flush(30) == 0


@guarded
def test_after_recovery_a_backlog_is_delivered_once(lab: Lab, guarded: bool) -> None:
    values = [b"n:%d" % number for number in range(40)]
    put(lab, *values)
    # Nothing is committed meanwhile: the seek goes back to the beginning. No state, which would know what is repeated.
    worker = start(lab, guarded, "recovery_order", "--stateless", "--commit-interval", "60")
    times = 1 if guarded else 2
    eventually(lambda: outputs(lab) == dict.fromkeys(values, times), 60, message=lambda: lab.log_of(worker)[-3000:])
    assert lab.stop(worker) == 0
    assert outputs(lab) == dict.fromkeys(values, times)


@guarded
def test_what_is_not_done_is_not_committed(lab: Lab, tmp_path: Path, guarded: bool) -> None:
    put(lab, b"wait:", b"n:0")
    worker = start(lab, guarded, "acknowledgement", "--batch", "1", "--gate", str(tmp_path / "never"))

    def met() -> bool:
        # Without the guard a rebalance between delivery and processing commits past both before they are looked at.
        return "the gate is closed" in lab.log_of(worker) or (not guarded and lab.uncommitted() == 0)

    eventually(met, 60, message=lambda: lab.log_of(worker)[-3000:])
    assert lab.stop(worker) == 0
    assert outputs(lab) == {}
    assert lab.uncommitted() == (2 if guarded else 0), "without the guard both are lost"


@guarded
def test_what_cannot_be_decoded_is_kept_and_the_rest_goes_on(lab: Lab, guarded: bool) -> None:
    put(lab, b"n:0", b"bad:1", b"n:2")
    worker = start(lab, guarded, "decoding", "--batch", "1")
    if guarded:
        lab.settled(workers=[worker])
        assert [letter.value() for letter in lab.read(f"{lab.topic}.dlq")] == [b"bad:1"]
        assert lab.stop(worker) == 0
    else:
        # The other guards keep it from being acknowledged, so it ends every worker that comes to it.
        assert worker.wait(60) == 1
        assert lab.read(f"{lab.topic}.dlq") == []
    assert outputs(lab).keys() == ({b"n:0", b"n:2"} if guarded else {b"n:0"})


@guarded
def test_a_refused_output_ends_the_worker_before_the_commit(lab: Lab, guarded: bool) -> None:
    put(lab, b"n:" + random.Random(1).randbytes(50_000))
    worker = start(lab, guarded, "confirmations")
    if guarded:
        assert worker.wait(60) == 1
        assert "MSG_SIZE_TOO_LARGE" in lab.log_of(worker)
        assert lab.uncommitted() == 1
        assert lab.counted() == {}
    else:
        lab.settled(workers=[worker])
        assert lab.counted() == {"k": 1}, "counted, and its output lost"
    assert outputs(lab) == {}


@guarded
def test_an_agent_that_raises_ends_the_worker_before_the_commit(lab: Lab, guarded: bool) -> None:
    put(lab, b"n:0", b"explode:1", b"n:2")
    worker = start(lab, guarded, "supervisor", "--batch", "1", "--fault", "an_agent_that_raises")
    if guarded:
        assert worker.wait(60) == 1
        assert lab.uncommitted() >= 2
        worker = lab.start()
    lab.settled(workers=[worker])
    done = {b"n:0", b"n:2", b"explode:1"} if guarded else {b"n:0", b"n:2"}
    assert outputs(lab).keys() == done, "without the guard it is skipped and committed"


@guarded
def test_only_the_port_that_was_asked_for_is_open(lab: Lab, guarded: bool) -> None:
    port = free_port()
    worker = start(lab, guarded, "web", "--metrics-port", str(port))
    eventually(lambda: lab.owns(worker), 60)
    connections = psutil.Process(worker.pid).net_connections("tcp")
    listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    assert port in listening
    assert len(listening - {port}) == (0 if guarded else 1)


@guarded
def test_a_commit_that_failed_is_tried_again(lab: Lab, guarded: bool) -> None:
    put(lab, *(b"n:%d" % number for number in range(20)))
    worker = start(lab, guarded, "failed_commit", "--fault", "a_commit_that_fails")
    eventually(lambda: "the first commit fails" in lab.log_of(worker), 60)
    assert lab.stop(worker) == 0
    assert len(outputs(lab)) == 20
    assert lab.uncommitted() == (0 if guarded else 20)


@guarded
def test_a_worker_that_stands_still_ends(lab: Lab, guarded: bool) -> None:
    put(lab, b"n:0", b"n:1", b"n:2")
    worker = start(lab, guarded, "watchdog", "--delay", "60", "--stall-limit", "1.5")
    if guarded:
        assert worker.wait(60) == 1
        assert "has made no progress" in lab.log_of(worker)
    else:
        eventually(lambda: lab.owns(worker), 60)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(3)
    assert lab.uncommitted() == 3


def test_a_worker_that_is_given_nothing_more_ends(lab: Lab) -> None:
    put(lab, b"n:0")
    worker = lab.start("--fault", "a_fetcher_that_stalls", "--stall-limit", "3")
    assert worker.wait(60) == 1
    assert f"although there is something to do on {lab.topic}[0]: ending" in lab.log_of(worker)
    assert lab.uncommitted() == 1


@guarded
def test_outputs_lie_on_the_partition_that_faust_and_the_jvm_choose(lab: Lab, tmp_path: Path, guarded: bool) -> None:
    keys = [b"", b"\xff\xfe", *(b"task-%d" % number for number in range(60))]
    config = producer_settings(StreamSettings(lab.bootstrap, tmp_path))
    if not guarded:
        del config["partitioner"]

    async def send() -> None:
        sink, faust = KafkaSink(config), AIOKafkaProducer(bootstrap_servers=lab.bootstrap)
        await faust.start()
        try:
            for key in keys:
                await faust.send(lab.topic, b"v", key)
            await faust.flush()
            await sink.send([Produce(f"{lab.topic}.out", key, b"v") for key in keys])
        finally:
            await faust.stop()
            sink.close()

    asyncio.run(send())
    theirs, ours = ({m.key(): m.partition() for m in lab.read(topic)} for topic in (lab.topic, f"{lab.topic}.out"))
    assert theirs.keys() == ours.keys() == set(keys)
    assert (ours == theirs) is guarded
