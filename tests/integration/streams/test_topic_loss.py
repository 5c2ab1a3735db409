"""Topics that are deleted, created again or resized under the join, on a real broker: nothing is dropped in silence."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from typer.testing import CliRunner

from schemas import topics
from schemas.records import AuditRecord, Message, Outcome, Task, TaskHead
from streams.apps.join.processor import APP_ID, JoinProcessor, limits_of
from streams.runtime.rebuild import StateRebuild
from tentalis.cli.main import app
from tentalis.kafka.codec import make_codec
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.ops.lost_topics import lost_topics
from tentalis.ops.verify import verify
from tentalis.ops.verify.model import ProblemKind
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support.join_support import head, open_, sample, score
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import ensure_topics, eventually, remove_before
from tests.support.kept_broker import FEW_PARTITIONS
from tests.support.recreated import recreate as both_recreated

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

OPEN = 8
CHANGELOG = topics.changelog(APP_ID, "state")
NO_RESULTS = ("stray-half", "stray-outcome", "mixed-rollout")
"""Rules that these tests break, because they write halves without results."""
STATES = ("memory", pytest.param("rocksdb", marks=pytest.mark.long))
LOOKS_OFTEN = (
    "-c",
    "from streams.runtime import worker; worker.ENDS_S = 1.0; from tentalis.cli.main import app; app()",
)


def heads(name: str, count: int = OPEN) -> list[TaskHead]:
    return [head(f"{name}-{number}", opd=None, deadline_ms=3_600_000) for number in range(count)]


def task_of(task: TaskHead) -> Task:
    fields = {name: getattr(task, name) for name in TaskHead.model_fields}
    return Task(event_time=now_ms(), messages=(Message(role="user", content="?"),), **fields)


def open_tasks(settings: Settings, tasks: list[TaskHead]) -> None:
    """Announces tasks, which wait for their scores."""
    publisher, now = Publisher(settings, "test", make_codec(settings)), now_ms()
    for task in tasks:
        publisher.send(topics.HALVES, open_(task, now))
    publisher.flush()


def close_tasks(settings: Settings, tasks: list[TaskHead]) -> None:
    publisher, now = Publisher(settings, "test", make_codec(settings)), now_ms()
    for task in tasks:
        publisher.send(topics.HALVES, score(sample(task), at=now))
    publisher.flush()


def recreate(settings: Settings, name: str) -> None:
    """Deletes a topic and creates it again, as `tentalis topics apply` would."""
    admin = AdminClient(client_config(settings))
    for future in admin.delete_topics([name]).values():
        future.result(30)
    eventually(lambda: name not in admin.list_topics(timeout=10).topics, 30)
    ensure_topics(settings)


def start(settings: Settings, workers: list[JoinWorker], folder: Path, *options: str) -> JoinWorker:
    """A join that looks at its topics every second."""
    workers.append(JoinWorker(str(settings.bootstrap), folder, f"join-{len(workers)}", *options, main=LOOKS_OFTEN))
    return workers[-1]


def catch_up(settings: Settings, worker: JoinWorker) -> None:
    """Waits until a join has committed all halves that are there now."""
    ends = end_offsets(settings, topics.HALVES)

    def caught_up() -> bool:
        assert worker.process.poll() is None
        done = committed_offsets(settings, APP_ID, [topics.HALVES])
        return all(done.get((topics.HALVES, partition), 0) >= end for partition, end in ends.items())

    eventually(caught_up, 60, message=lambda: worker.log.read_text()[-2000:])


def run_once(settings: Settings, workers: list[JoinWorker], folder: Path, *options: str) -> None:
    """Runs a join until it has committed all halves, and ends it."""
    worker = start(settings, workers, folder, *options)
    eventually(worker.owned, 60, message=lambda: worker.log.read_text()[-2000:])
    catch_up(settings, worker)
    assert worker.end() == 0


def refuses(worker: JoinWorker, code: int = ExitCode.PERMANENT) -> str:
    """Waits until a join refuses; what it says."""
    assert worker.process.wait(60) == code, worker.log.read_text()[-3000:]
    return next(line for line in reversed(worker.log.read_text().splitlines()) if " ends: " in line)


def test_what_happens_to_the_topics_of_a_running_join_ends_it(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    open_tasks(settings, heads("task"))
    worker = start(settings, workers, tmp_path)
    catch_up(settings, worker)
    recreate(settings, topics.HALVES)
    assert topics.HALVES in refuses(worker)


@pytest.mark.parametrize("topic", [topics.HALVES, topics.OUTCOMES], ids=["input", "output"])
def test_more_partitions_end_a_running_join(
    topic: str, settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    open_tasks(settings, heads("task"))
    worker = start(settings, workers, tmp_path)
    catch_up(settings, worker)
    admin = AdminClient(client_config(settings))
    for future in admin.create_partitions([NewPartitions(topic, 12)]).values():
        future.result(30)
    assert f"{topic} had {FEW_PARTITIONS} partitions and has 12" in refuses(worker, ExitCode.DRIFT)


def test_state_and_offsets_of_an_earlier_version_are_accepted(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    tasks = heads("task")
    open_tasks(settings, tasks)
    run_once(settings, workers, tmp_path)
    # Commits as an earlier version did: without notes.
    done = committed_offsets(settings, APP_ID, [topics.HALVES])
    admin = AdminClient(client_config(settings))
    places = [TopicPartition(*place, offset) for place, offset in done.items()]

    def reset() -> bool:
        future = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(APP_ID, places)])[APP_ID]
        try:
            future.result(30)
        except KafkaException as error:  # the static member's session has not ended yet
            assert error.args[0].code() != KafkaError.UNKNOWN_MEMBER_ID
            raise
        return True

    eventually(reset, 60)
    close_tasks(settings, tasks)
    run_once(settings, workers, tmp_path)
    codec = make_codec(settings)
    found = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    assert sorted(each.key for each in found) == sorted(f"{task.task_id}/0" for task in tasks)


def publish_tasks(settings: Settings, tasks: list[TaskHead]) -> None:
    publisher = Publisher(settings, "test", make_codec(settings))
    for task in tasks:
        publisher.send(topics.TASKS, task_of(task))
    publisher.flush()


@pytest.mark.parametrize("state", STATES)
def test_an_accepted_loss_gives_every_open_task_an_outcome(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path, state: str
) -> None:
    """The eight open tasks are given up; the others are done, and stay as they are; new ones are joined."""
    lost, done, new = heads("lost"), heads("done"), heads("new")
    publish_tasks(settings, [*lost, *done, *new])
    open_tasks(settings, [*lost, *done])
    close_tasks(settings, done)
    run_once(settings, workers, tmp_path, "--state", state)
    before = sum(end_offsets(settings, CHANGELOG).values())
    recreate(settings, CHANGELOG)
    for _ in range(2):
        said = refuses(start(settings, workers, tmp_path, "--state", state))
        assert f"{CHANGELOG} was deleted and created again" in said
        assert f"{OPEN} samples of open tasks would get no outcome" in said
        # As of the last commit: the last records may have been written after it.
        lost_records = re.search(r"(\d+) records", said)
        assert lost_records is not None and 0 < int(lost_records[1]) <= before and "--accept-loss" in said, said
    assert sum(end_offsets(settings, CHANGELOG).values()) == 0, "nothing is written on a refusal"
    run_once(settings, workers, tmp_path, "--state", state, "--accept-loss")
    open_tasks(settings, new)
    close_tasks(settings, [*new, *lost])  # the halves of what is given up come late
    run_once(settings, workers, tmp_path, "--state", state)  # and nothing is left to accept
    codec = make_codec(settings)
    records = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    outcomes = {each.key: each for each in records if isinstance(each, Outcome)}
    assert {key for key, each in outcomes.items() if each.given_up} == {f"{task.task_id}/0" for task in lost}
    report = verify(settings, "run")
    assert report.outcomes == {"given_up": OPEN, "late": OPEN, "rl": 2 * OPEN}
    assert [each for each in report.problems if each.kind is ProblemKind.LOST] == []
    assert [each.rule for each in report.problems if each.rule not in NO_RESULTS] == []
    audit = [record.decode(codec) for record in read_to_end(settings, topics.AUDIT)]
    given_up = [each.record_id for each in audit if isinstance(each, AuditRecord) and each.record_type == "Outcome"]
    assert sorted(given_up) == sorted(each.outcome_id for each in outcomes.values() if each.given_up)
    assert {each.topic for each in audit if isinstance(each, AuditRecord) and each.record_type == "TopicLost"} == {
        CHANGELOG
    }


@pytest.mark.parametrize("state", STATES)
def test_input_and_changelog_lost_together_are_refused_until_that_is_accepted(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path, state: str
) -> None:
    """Kafka deletes the committed offsets with the input: neither they nor the changelog tell of the loss."""
    new = heads("new")
    open_tasks(settings, heads("lost"))
    run_once(settings, workers, tmp_path, "--state", state)
    both_recreated(settings, topics.HALVES, CHANGELOG)
    open_tasks(settings, new)
    close_tasks(settings, new)
    for _ in range(2):
        said = refuses(start(settings, workers, tmp_path, "--state", state))
        assert f"{topics.HALVES} was deleted and created again" in said
        assert f"{CHANGELOG} was deleted and created again" in said
        assert f"partitions 0-{FEW_PARTITIONS - 1}" in said and "could not be counted" in said, said
    assert any(f"join: {topics.HALVES} was deleted" in each for each in lost_topics(settings))
    run_once(settings, workers, tmp_path, "--state", state, "--accept-loss")
    assert not any(each.startswith("join: ") for each in lost_topics(settings))
    run_once(settings, workers, tmp_path, "--state", state)  # and nothing is left to accept
    codec = make_codec(settings)
    outcomes = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    assert sorted(each.key for each in outcomes) == sorted(f"{task.task_id}/0" for task in new)
    audit = [record.decode(codec) for record in read_to_end(settings, topics.AUDIT)]
    lost = [(each.topic, each.partition) for each in audit if isinstance(each, AuditRecord)]
    assert sorted(lost) == sorted(
        (topic, partition) for topic in (topics.HALVES, CHANGELOG) for partition in range(FEW_PARTITIONS)
    )


@pytest.mark.parametrize("state", STATES)
def test_an_accepted_loss_of_the_input_begins_on_the_new_topic(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path, state: str
) -> None:
    lost, done, new = heads("lost"), heads("done"), heads("new")
    open_tasks(settings, [*lost, *done])
    close_tasks(settings, done)
    run_once(settings, workers, tmp_path, "--state", state)
    recreate(settings, topics.HALVES)
    open_tasks(settings, new)
    close_tasks(settings, [*new, *lost, *done])  # what was dropped without a word
    for _ in range(2):
        said = refuses(start(settings, workers, tmp_path, "--state", state))
        assert f"{topics.HALVES} was deleted and created again" in said
        assert f"{OPEN} samples of open tasks" in said
    run_once(settings, workers, tmp_path, "--state", state, "--accept-loss")
    for each in ("memory", "rocksdb"):
        run_once(settings, workers, tmp_path, "--state", each)
    codec = make_codec(settings)
    records = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    kinds = sorted(
        (each.key.split("-")[0], "given up" if each.given_up else each.kind.value)
        for each in records
        if isinstance(each, Outcome)
    )
    # The scores of `done` were joined before, and are known still.
    assert kinds == sorted([("lost", "given up"), ("lost", "late"), ("done", "rl"), ("new", "rl")] * OPEN)


@pytest.mark.parametrize("state", STATES)
def test_records_that_were_removed_before_the_join_read_them_are_named_and_given_up(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path, state: str
) -> None:
    waiting, unread = heads("waiting"), heads("unread")
    open_tasks(settings, waiting)
    run_once(settings, workers, tmp_path, "--state", state)
    read = committed_offsets(settings, APP_ID, [topics.HALVES])  # the last ticks of the join come after
    remove_before(settings, topics.HALVES, {partition: offset for (_, partition), offset in read.items()})
    assert lost_topics(settings) == []
    run_once(settings, workers, tmp_path, "--state", state)
    open_tasks(settings, unread)
    read, ends = committed_offsets(settings, APP_ID, [topics.HALVES]), end_offsets(settings, topics.HALVES)
    lost = sum(ends.values()) - sum(read.values())
    remove_before(settings, topics.HALVES, ends)
    (named,) = lost_topics(settings)
    for said in (named, refuses(start(settings, workers, tmp_path, "--state", state))):
        assert f"{topics.HALVES} has lost records that were not read" in said and f"up to {lost} records" in said, said
    run_once(settings, workers, tmp_path, "--state", state, "--accept-loss")
    assert lost_topics(settings) == []
    close_tasks(settings, waiting)
    run_once(settings, workers, tmp_path, "--state", state)
    codec = make_codec(settings)
    outcomes = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    assert sorted(each.key for each in outcomes) == sorted(f"{task.task_id}/0" for task in waiting), "the state stays"
    audit = [record.decode(codec) for record in read_to_end(settings, topics.AUDIT)]
    given_up = [each for each in audit if isinstance(each, AuditRecord)]
    assert {each.topic for each in given_up} == {topics.HALVES} and sum(each.offset or 0 for each in given_up) == lost


def test_records_that_are_removed_before_a_running_join_reads_them_end_it(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    open_tasks(settings, heads("task"))
    worker = start(settings, workers, tmp_path)
    catch_up(settings, worker)
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)  # the broker answers the last fetch of the join, with no records
    open_tasks(settings, heads("unread"))
    remove_before(settings, topics.HALVES, end_offsets(settings, topics.HALVES))
    worker.process.send_signal(signal.SIGCONT)
    said = refuses(worker, ExitCode.ERROR)
    assert "is the next record to read, and the broker does not have it" in said
    assert "has lost records that were not read" in refuses(start(settings, workers, tmp_path))


def rebuilt(settings: Settings, *options: str) -> list[dict[str, Any]]:
    """Runs `tentalis state rebuild join`; its rows."""
    command = ["state", "rebuild", "join", "--output", "json", "--bootstrap-server", str(settings.bootstrap)]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_lost_changelog_is_rebuilt_from_the_halves(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    waiting, done = heads("waiting"), heads("done")
    open_tasks(settings, [*waiting, *done])
    close_tasks(settings, done)
    worker = start(settings, workers, tmp_path)
    catch_up(settings, worker)
    command = ["state", "rebuild", "join", "--bootstrap-server", str(settings.bootstrap)]
    active = CliRunner().invoke(app, command)
    assert active.exit_code == ExitCode.ERROR
    assert worker.end() == 0
    recreate(settings, CHANGELOG)
    refuses(start(settings, workers, tmp_path))
    eventually(lambda: CliRunner().invoke(app, command).exit_code == 0, 60, 1.0)  # the static member's session ends
    assert sum(end_offsets(settings, CHANGELOG).values()) == 0, "a dry run writes nothing"
    interrupted = StateRebuild(settings, JoinProcessor(make_codec(settings), limits_of(86_400_000)))
    interrupted.begin(interrupted.spans())
    assert f"{CHANGELOG} was deleted and created again" in refuses(start(settings, workers, tmp_path))
    eventually(lambda: CliRunner().invoke(app, command).exit_code == 0, 60, 1.0)
    assert rebuilt(settings) == rebuilt(settings, "--yes")
    close_tasks(settings, waiting)
    run_once(settings, workers, tmp_path)
    codec = make_codec(settings)
    records = [record.decode(codec) for record in read_to_end(settings, topics.OUTCOMES)]
    assert sorted(each.key for each in records) == sorted(f"{task.task_id}/0" for task in [*waiting, *done])
    assert {each.kind.value for each in records if isinstance(each, Outcome)} == {"rl"}


def test_a_rebuilt_state_without_halves_of_open_tasks_must_be_accepted(
    settings: Settings, workers: list[JoinWorker], tmp_path: Path
) -> None:
    """The Opens of the first tasks leave the log, as by retention."""
    gone, kept = heads("gone"), heads("kept")
    publish_tasks(settings, [*gone, *kept])
    open_tasks(settings, gone)
    ends = end_offsets(settings, topics.HALVES)
    open_tasks(settings, kept)
    run_once(settings, workers, tmp_path)
    remove_before(settings, topics.HALVES, ends)
    recreate(settings, CHANGELOG)
    command = ["state", "rebuild", "join", "--bootstrap-server", str(settings.bootstrap)]
    eventually(lambda: CliRunner().invoke(app, command).exit_code == 0, 60, 1.0)  # the static member's session ends
    assert sum(row["lacking"] for row in rebuilt(settings)) == OPEN
    refused = CliRunner().invoke(app, [*command, "--yes"])
    assert refused.exit_code == ExitCode.PERMANENT and f"{OPEN} open tasks" in refused.stderr, refused.output
    assert sum(end_offsets(settings, CHANGELOG).values()) == 0, "nothing is written"
    rebuilt(settings, "--yes", "--accept-loss")
    close_tasks(settings, kept)
    run_once(settings, workers, tmp_path)
    report = verify(settings, "run")
    assert (report.outcomes, report.numbers["given_up"]) == ({"rl": OPEN}, OPEN)
    assert [each.rule for each in report.problems if each.rule not in NO_RESULTS] == []
