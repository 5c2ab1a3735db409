"""A turn that a client saw complete is recorded once: with the broker away, the disk full, and the process killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.place import RecordPlace
from schemas.wire.avro import AvroSchema, current
from schemas.wire.codec import Codec
from tentalis.gateway.recording.recorder import TurnRecorder
from tentalis.gateway.recording.spool import RecordSpool, SpooledRecord
from tests.support.gateway_lab import Became, Lab, MemoryLog, lab, wait_for


def _ids(gateway: Lab) -> Counter[str]:
    return Counter(record.event_id for record in gateway.log.taken)


def _spooled(folder: Path) -> int:
    return len(list((folder / "spool").glob("*.record")))


def test_turns_wait_on_disk_while_the_broker_is_away_and_arrive_once(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.log.away = True
        ids = {gateway.chat("one").headers["x-request-id"]}
        assert _spooled(tmp_path) == 1 and gateway.log.taken == []
        began = time.monotonic()
        with gateway.streaming("two") as response:
            ids.add(response.headers["x-request-id"])
            assert "[DONE]" in response.read().decode()
        assert time.monotonic() - began < 60  # it did not wait for the broker again
        assert _spooled(tmp_path) == 2
        gateway.log.back()
        wait_for(lambda: set(_ids(gateway)) == ids and _spooled(tmp_path) == 0)
        ids.add(gateway.chat("three").headers["x-request-id"])
        assert _ids(gateway) == dict.fromkeys(ids, 1)
        assert gateway.metric("tentalis_gateway_recorded_total", became="spool") == 2
        assert gateway.metric("tentalis_gateway_recorded_total", became="drained") == 2


def test_turns_of_a_session_keep_their_order(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.log.away = True
        gateway.chat("first", headers={"X-Session-Id": "s"})
        gateway.log.ids_on_log = lambda *_: (_ for _ in ()).throw(TimeoutError())  # type: ignore[method-assign]
        gateway.log.back(lost=True)
        wait_for(lambda: not gateway.deps.recorder._late_ids)
        gateway.chat("second", headers={"X-Session-Id": "s"})
        gateway.chat("another", headers={"X-Session-Id": "t"})
        assert [event.messages[0].content for event in gateway.log.events] == ["another"]
        del gateway.log.ids_on_log
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert [event.messages[0].content for event in gateway.log.events] == ["another", "first", "second"]


def test_an_unconfirmed_turn_is_sent_again_unless_it_is_on_the_log(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.log.away = True
        lost = gateway.chat("lost").headers["x-request-id"]
        gateway.log.back(lost=True)
        wait_for(lambda: _ids(gateway) == {lost: 1} and _spooled(tmp_path) == 0)
        # The broker had it after all, and the process that sent it was killed before it heard so.
        gateway.log.away = True
        gateway.chat("there")
        [(there, _)] = gateway.log._waiting
        gateway.log.taken.append(there)
        gateway.log.back(lost=True)
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert _ids(gateway)[there.event_id] == 1


def test_a_turn_that_neither_broker_nor_disk_takes_has_no_completed_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with lab(tmp_path) as gateway:
        gateway.log.away = True
        monkeypatch.setattr("tentalis.gateway.recording.spool.os.fsync", full)
        refused = gateway.chat("x")
        assert refused.status_code == 503 and "Good day" not in refused.text
        seen = gateway.stream("x")
        assert None not in seen and seen[-1] and "error" in seen[-1]
        assert all(c["choices"][0]["finish_reason"] is None for c in seen if c and "choices" in c)
        assert list((tmp_path / "spool").glob("[!.]*")) == []
        assert gateway.metric("tentalis_gateway_recorded_total", became="lost") == 2
        monkeypatch.undo()
        assert gateway.chat("x").status_code == 200 and _spooled(tmp_path) == 1


def test_past_its_bytes_the_spool_refuses_a_turn_and_its_client_may_try_again(tmp_path: Path) -> None:
    with lab(tmp_path, spool_bytes=6000) as gateway:
        gateway.log.away = True
        answers = [gateway.chat("x" * 2000) for _ in range(4)]
        taken = [answer for answer in answers if answer.status_code == 200]
        assert 0 < len(taken) == _spooled(tmp_path) < 4
        refused = answers[-1]
        assert refused.status_code == 503 and refused.headers["retry-after"] and "Good day" not in refused.text
        gateway.log.back()
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert gateway.chat("x" * 2000).status_code == 200


class SlowRegistry:
    """A schema registry that answers nothing until it is `up`."""

    def __init__(self) -> None:
        self.up = threading.Event()

    def id_of(self, schema: AvroSchema) -> int:
        self.up.wait(60)
        return 7

    def schema_by_id(self, schema_id: int) -> AvroSchema:
        return current("SessionEvent")


def test_a_schema_registry_that_hangs_holds_up_no_call_and_loses_no_turn(tmp_path: Path) -> None:
    registry = SlowRegistry()
    log = MemoryLog(Codec(registry))
    with lab(tmp_path, events=log) as gateway:
        ids = [gateway.chat(text, headers={"X-Session-Id": "s"}).headers["x-request-id"] for text in ("one", "two")]
        assert not registry.up.is_set() and _spooled(tmp_path) == 2 and log.taken == []
        registry.up.set()
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert [record.event_id for record in log.taken] == ids
        assert {record.value[:5] for record in log.taken} == {b"\x00\x00\x00\x00\x07"}
        gateway.chat("three", headers={"X-Session-Id": "s"})
        assert [event.messages[0].content for event in log.events] == ["one", "two", "three"]
        assert log.taken[-1].value[:5] == b"\x00\x00\x00\x00\x07"
    log.close()


def test_a_record_that_nobody_can_ever_read_is_set_aside_and_stops_no_other(tmp_path: Path) -> None:
    spool = RecordSpool(tmp_path / "spool")
    with lab(tmp_path / "other") as other:
        other.chat("left behind")
        [left] = other.log.taken
    unknown = b"\xc3\x01unknown!" + left.value[10:]
    spool.put(SpooledRecord("e1", left.topic, b"k", unknown, (), left.since))
    spool.put(left)
    spool.close()
    registry = SlowRegistry()
    registry.up.set()
    log = MemoryLog(Codec(registry))
    with lab(tmp_path, events=log) as gateway:
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert [record.event_id for record in log.taken] == [left.event_id]
        wait_for(lambda: gateway.metric("tentalis_gateway_recorded_total", became="set_aside") == 1)
    [aside] = (tmp_path / "spool").glob("*.damaged")
    assert SpooledRecord.from_bytes(aside.read_bytes()).value == unknown


class Sink(MemoryLog):
    """Keeps only the names of what it takes, and counts how often it is looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_ids: list[str] = []
        self.looks = 0

    def send(self, record: SpooledRecord, done: Became) -> None:
        self.sent_ids.append(record.event_id)
        done(RecordPlace(record.topic, 0, len(self.sent_ids)))

    def ids_on_log(self, topic: str, since: int, event_ids: Any) -> set[str]:
        self.looks += 1
        return set()


def _drained(folder: Path, count: int, size: int) -> tuple[list[str], Sink, int]:
    """Returns the records of a spool of this size, the log after draining, and the greatest memory for it in bytes."""
    spool, log = RecordSpool(folder), Sink()
    names = [f"e{at}" for at in range(count)]
    for name in names:
        spool.put(SpooledRecord(name, topics.SESSIONS, b"k", bytes(size), (), 1))
    tracemalloc.start()
    try:
        TurnRecorder(log, spool, 1.0, lambda became, amount=1: None).drain_once()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    spool.close()
    return names, log, peak


def test_the_log_is_looked_through_once_however_much_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.gateway.recording.recorder.DRAIN_BATCH_RECORDS", 10)
    names, log, _ = _drained(tmp_path, 35, 10)
    assert (log.sent_ids, log.looks) == (names, 1)


def test_a_spool_of_large_records_is_drained_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tentalis.gateway.recording.recorder.DRAIN_BATCH_BYTES", 4 * 2**20)
    names, log, peak = _drained(tmp_path, 48, 2**20)
    assert log.sent_ids == names and peak < 16 * 2**20


WRITER = """
import sys, itertools
from pathlib import Path
from tentalis.gateway.recording.spool import RecordSpool, SpooledRecord
spool = RecordSpool(Path(sys.argv[1]))
for at in itertools.count():
    spool.put(SpooledRecord(f"e{at}", "t", b"k", bytes(100_000), (), at))
    print(at, flush=True)
"""


def test_what_the_spool_has_taken_survives_kill_9(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline().strip() for _ in range(7)]
    os.kill(writer.pid, signal.SIGKILL)
    said += writer.stdout.read().split()
    writer.wait(30)
    writer.stdout.close()
    spool = RecordSpool(tmp_path)  # the lock went with the process
    held = {record.event_id: record for record in spool.records(spool.entries())}
    assert {f"e{at}" for at in said} <= set(held)
    assert all(record.value == bytes(100_000) for record in held.values())
    assert not list(tmp_path.glob("*.damaged")) and not list(tmp_path.glob("*.tmp"))
    spool.close()


def test_what_a_killed_gateway_left_on_disk_the_next_one_brings_to_the_log(tmp_path: Path) -> None:
    spool = RecordSpool(tmp_path / "spool")
    with lab(tmp_path / "other") as other:
        other.chat("left behind")
        [left] = other.log.taken
    spool.put(left)
    spool.put(SpooledRecord("e2", left.topic, b"k", left.value, (("ce_id", b"e2"),), left.since))
    spool.close()
    with lab(tmp_path) as gateway:
        wait_for(lambda: _spooled(tmp_path) == 0)
        assert _ids(gateway) == {left.event_id: 1, "e2": 1}
