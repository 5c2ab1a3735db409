"""The sessions as a process on a real broker: killed in the middle, they write what a fold of the same log says."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas import topics
from schemas.records import Feedback, Record, Source
from streams.apps.sessions.core import SessionLimits
from streams.apps.sessions.processor import SessionsProcessor
from streams.runtime.processor import LogRecord
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tests.support.fork_server import ForkedProcess
from tests.support.join_support import drive
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.sessions_support import end, side, turn

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

SESSIONS, IDLE_S = 24, 3.0
WRITTEN = (topics.TASKS, topics.RESULTS, topics.FEEDBACK)


def worker(settings: Settings, home: Path, name: str, *options: str) -> "subprocess.Popen[bytes]":
    """`tentalis serve sessions` as a process of its own."""
    environment = os.environ | {"TENTALIS_BOOTSTRAP": settings.require_bootstrap(), "TENTALIS_HOME": str(home)}
    command = ["-m", "tentalis.cli", "serve", "sessions", "--instance", "0", "--idle", str(IDLE_S), *options]
    return ForkedProcess(command, environment, home / f"{name}.log")


def values(settings: Settings) -> dict[tuple[str, str], set[bytes]]:
    """All that is written, and per topic and record id the different values."""
    codec, found = make_codec(settings), dict[tuple[str, str], set[bytes]]()
    for topic in WRITTEN:
        for stored in read_to_end(settings, topic):
            assert stored.value is not None
            found.setdefault((topic, stored.decode(codec).event_id), set()).add(stored.value)
    return found


def written_more(settings: Settings, than: int) -> bool:
    """Returns True if more different records are written than `than`."""
    try:
        return len(values(settings)) > than
    except KafkaException as error:
        # A broker that has just started may not know of a topic that was just created.
        assert error.args[0].code() != KafkaError._UNKNOWN_PARTITION, error
        raise


def heard(settings: Settings) -> dict[str, set[str]]:
    """Returns the feedback on each turn, by the event of the turn, without implicit signals."""
    codec, found = make_codec(settings), dict[str, set[str]]()
    for stored in read_to_end(settings, topics.FEEDBACK):
        feedback = stored.decode(codec)
        assert isinstance(feedback, Feedback) and feedback.result is not None
        if feedback.source is not Source.ENVIRONMENT:
            found.setdefault(feedback.result.task.metadata["session_event_id"], set()).add(feedback.text)
    return found


def tail(log: Path) -> str:
    """The end of a process's log."""
    return log.read_text()[-3000:]


def folded(settings: Settings) -> dict[tuple[str, str], set[bytes]]:
    """Returns the output of an undisturbed fold of the log."""
    codec = make_codec(settings)
    processor = SessionsProcessor(codec, SessionLimits(idle_ms=round(1000 * IDLE_S)))
    found: dict[tuple[str, str], set[bytes]] = {}
    for stored in read_to_end(settings, topics.SESSIONS):
        if stored.partition not in processor.partitions:
            processor.restore(stored.partition, {})
        place = (stored.topic, stored.partition, stored.offset, stored.timestamp)
        record = LogRecord(*place, stored.key, stored.value or b"", tombstone=stored.value is None)
        for output in drive(processor.process(stored.partition, [record])).outputs:
            made = codec.decode(output.value, topic=output.topic, partition=0, offset=0)
            found.setdefault((output.topic, made.event_id), set()).add(output.value)
    return found


def events(number: int, first: int, last: int) -> list[Record]:
    """Turns of a session; every third ends by header, every third by call, the others fall silent."""
    talk = ["question", *(text for i in range(last) for text in (f"answer {i}", f"more {i}"))]
    name, found = f"s{number}", list[Record]()
    for i in range(first, last):
        done = i + 1 == last == 4 and number % 3 == 0
        event = turn(f"{name}-{i}", *talk[: 2 * i + 1], answer=f"answer {i}", session=name, done=done)
        found += [event, event] if i == 1 else [side(f"{name}-side-{i}", session=name), event]
    return [*found, end(f"{name}-end", name)] if last == 4 and number % 3 == 1 else found


@pytest.mark.parametrize("state", ["memory", pytest.param("rocksdb", marks=pytest.mark.long)])
def test_killed_in_the_middle_they_write_what_the_log_says(
    own_broker: EmbeddedBroker, tmp_path: Path, state: str
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap)
    ensure_topics(settings)
    publisher = Publisher(settings, "test", make_codec(settings))

    def put(first: int, last: int) -> None:
        for number in range(SESSIONS):
            for event in events(number, first, last):
                publisher.send(topics.SESSIONS, event)
        publisher.flush()

    started: list[subprocess.Popen[bytes]] = []
    try:
        put(0, 2)
        before = 0
        for round_ in range(2):
            started.append(worker(settings, tmp_path, f"killed-{round_}", "--state", state))
            log = tmp_path / f"killed-{round_}.log"
            eventually(partial(written_more, settings, before), 90, message=partial(tail, log))
            put(2 + round_, 3 + round_)
            started[-1].kill()
            started[-1].wait(10)
            before = len(values(settings))
        started.append(worker(settings, tmp_path, "last", "--state", state))

        eventually(lambda: len(heard(settings)) == 4 * SESSIONS, 90, 0.5, partial(tail, tmp_path / "last.log"))
        started[-1].terminate()
        assert started[-1].wait(10) == 0
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    found = values(settings)
    assert found == folded(settings)
    assert all(len(different) == 1 for different in found.values()), "what is repeated is equal"
    said = heard(settings)
    for number in range(SESSIONS):
        for i in range(4):
            assert said[f"s{number}-{i}"] <= {f"more {i}", ""} and (i < 3 or said[f"s{number}-{i}"] == {""})
