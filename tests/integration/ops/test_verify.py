"""`tentalis verify` on a real broker: the handmade run, written to the topics, is read back and judged."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Record, Task
from tentalis.cli.main import app
from tentalis.kafka.admin import ensure
from tentalis.kafka.codec import make_codec
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.ops.verify import Log, check
from tentalis.ops.verify.reader import UnknownRun, read
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka
from tests.support.verify_run import consistent

pytestmark = pytest.mark.broker
runner = CliRunner()

# Undecodable records have no run: those that other tests left on this broker are reported with each run.
LEFT_BY_OTHERS = "undecodable-lost"


@pytest.fixture
def settings(kafka: Kafka) -> Settings:
    found = Settings(bootstrap=kafka.bootstrap)
    ensure(found)
    return found


def written(settings: Settings, log: Log, rename: Callable[[Record], Record]) -> None:
    """Puts a log on the topics, record by record in the order in which it came about."""
    publisher = Publisher(settings, "test", make_codec(settings))
    everything: list[Any] = []
    for name in ("manifests", "tasks", "results", "feedback", "opens", "scores", "hints", "outcomes", "rollouts"):
        everything += getattr(log, name)
    for seen in sorted(everything, key=lambda seen: seen.timestamp):
        partition = None if seen.topic in (topics.RUNS, topics.BATCHES, topics.POLICIES) else seen.partition
        publisher.send(seen.topic, rename(seen.record), partition=partition)
    publisher.flush()


def renamed(run: str, unique: str) -> Callable[[Record], Record]:
    """Gives the run and its tasks ids of their own, wherever they are named: several tests share a broker."""
    ids = {seen.record.task_id for seen in consistent().tasks}

    def replace(record: Record) -> Record:
        text = record.model_dump_json().replace('"run-1"', json.dumps(run))
        for task_id in ids:
            text = text.replace(task_id, f"{unique}-{task_id}")
        return type(record).model_validate_json(text)

    return replace


def test_a_run_is_read_back_whole(settings: Settings, unique: str) -> None:
    log = consistent()
    written(settings, log, renamed(unique, unique))
    found = read(settings, unique)
    for name in ("tasks", "results", "feedback", "opens", "scores", "hints", "outcomes", "rollouts"):
        assert len(getattr(found, name)) == len(getattr(log, name)), name
    assert found.clock
    report = check(found, allow_open=True)
    # With other ids in them digests cannot hold, and the halves lie at other offsets; everything else must.
    expected = {"forged-rollout", "manifest-altered", "mixed-rollout", LEFT_BY_OTHERS}
    assert {problem.rule for problem in report.problems} <= expected, report.problems
    assert report.numbers["tasks"] == 5
    assert report.numbers["results"] == 5


def test_an_unknown_run_is_answered_with_the_known_ones(settings: Settings, unique: str) -> None:
    written(settings, consistent(), renamed(f"{unique}-known", unique))
    with pytest.raises(UnknownRun, match=f"{unique}-known"):
        read(settings, f"{unique}-unknown")


def test_bad_bytes_must_be_on_their_dead_letter_topic_unchanged(settings: Settings, unique: str) -> None:
    written(settings, consistent(), renamed(unique, unique))
    publisher = Publisher(settings, "test", make_codec(settings))
    place = RecordPlace(topics.FEEDBACK, 5, end_offsets(settings, topics.FEEDBACK)[5])
    publisher.send_bytes(topics.FEEDBACK, unique.encode(), b"\xde\xad", partition=5)
    publisher.flush()
    found = read(settings, unique)
    assert place in {undecodable for undecodable, _ in found.undecodable} - found.dead
    headers = [
        ("tentalis.dlq.original-partition", str(place.partition).encode()),
        ("tentalis.dlq.original-offset", str(place.offset).encode()),
    ]
    for value, kept in ((b"\xde\xad!", False), (b"\xde\xad", True)):
        publisher.send_bytes(topics.dlq(topics.FEEDBACK), unique.encode(), value, headers)
        publisher.flush()
        assert (place in read(settings, unique).dead) is kept


def test_verify_prints_counts_and_problems_and_exits_with_1_on_problems(settings: Settings, unique: str) -> None:
    """One task, one sample, nothing else: it is open, which is a problem unless it is allowed."""
    first = consistent().tasks[0].record
    task = Task.model_validate(first.model_dump() | {"task_id": unique, "run_id": unique, "n_samples": 1})
    publisher = Publisher(settings, "test", make_codec(settings))
    publisher.send(topics.TASKS, task)
    publisher.send_bytes(topics.RUNS, b"garbage", unique.encode())
    publisher.flush()
    arguments = ["verify", unique, "--bootstrap-server", str(settings.bootstrap), "-o", "json"]
    done = runner.invoke(app, arguments)
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (found["tasks"], found["samples"], found["open"]) == (1, 1, 1)
    own = [problem["rule"] for problem in found["problems"] if problem["rule"] != LEFT_BY_OTHERS]
    assert sorted(own) == ["missing-open", "open-task"]
    assert found["lost"] == len(found["problems"]) - 1  # the open task is not lost
    assert any(line.startswith(f"{topics.RUNS}[0]@") and "bad magic" in line for line in found["unreadable"])
    table = runner.invoke(app, [*arguments[:-2], "--allow-open"])
    assert table.exit_code == 1
    assert "missing-open" in table.stdout
    assert "open-task" not in table.stdout
    unknown = runner.invoke(app, ["verify", "no-such-run", *arguments[2:]])
    assert unknown.exit_code == 1
    assert "belongs to run no-such-run" in unknown.stderr
