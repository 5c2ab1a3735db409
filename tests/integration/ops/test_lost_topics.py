"""Processes and commands that see a topic being lost or resized, on a real broker."""

import threading
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.kafka import topic_client, topic_watch
from tentalis.kafka.config import client_config
from tentalis.kafka.identity import PartitionsChanged, TopicLost
from tentalis.kafka.topic_watch import TopicWatch, ending_on_changes
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.lost_topics import lost_topics
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.integration.streams.test_topic_loss import CHANGELOG, heads, open_tasks, run_once
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import Kafka, ensure_topics, eventually

pytestmark = pytest.mark.broker


def seen(watch: TopicWatch) -> bool:
    try:
        watch.check()
    except (TopicLost, PartitionsChanged):
        return True
    return False


def created(admin: AdminClient, name: str) -> None:
    for future in admin.create_topics([NewTopic(name, 2, 1)]).values():
        future.result(30)
    eventually(lambda: name in admin.list_topics(timeout=10).topics, 30)


def test_a_running_process_sees_new_partitions_and_a_new_topic(
    kafka: Kafka, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watch, "LOOK_S", 0.2)
    settings = Settings(bootstrap=kafka.bootstrap)
    ensure_topics(settings)  # with the record of topic ids, with which a process compares at its start
    admin = AdminClient(client_config(settings))
    grown, replaced = f"{unique}-grown", f"{unique}-replaced"
    for name in (grown, replaced):
        created(admin, name)
    looks = threading.Semaphore(0)
    look = TopicWatch._look
    monkeypatch.setattr(TopicWatch, "_look", lambda *given: (look(*given), looks.release()))
    growing, replacing = TopicWatch(settings, [grown], ""), TopicWatch(settings, [replaced], "")
    for _ in range(6):
        assert looks.acquire(timeout=30)
    assert not seen(growing) and not seen(replacing)
    for future in admin.create_partitions([NewPartitions(grown, 3)]).values():
        future.result(30)
    eventually(lambda: seen(growing), 30)
    with pytest.raises(PartitionsChanged, match=f"{grown} had 2 partitions and has 3"):
        growing.check()
    for future in admin.delete_topics([replaced]).values():
        future.result(30)
    eventually(lambda: seen(replacing), 30)
    with pytest.raises(TopicLost, match=replaced):
        replacing.check()
    with pytest.raises(PartitionsChanged):
        # The first look of a process takes the topics as they are.
        ending_on_changes(settings, [grown], lambda stop: _grow_and_wait(admin, grown, stop))(threading.Event())


def _grow_and_wait(admin: AdminClient, name: str, stop: threading.Event) -> None:
    stop.wait(2.0)
    for future in admin.create_partitions([NewPartitions(name, 4)]).values():
        future.result(30)
    assert stop.wait(30), "the process was not asked to end"


def test_commands_name_a_lost_topic_and_apply_does_not_hide_it(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_client, "TOPIC_PATIENCE_S", 0.5)
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path)
    ensure_topics(settings)
    assert lost_topics(settings) == []
    open_tasks(settings, heads("task"))
    workers: list[JoinWorker] = []
    try:
        run_once(settings, workers, tmp_path)
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.end(kill=True)
    assert lost_topics(settings) == []
    admin = AdminClient(client_config(settings))
    for future in admin.delete_topics([CHANGELOG]).values():
        future.result(30)
    eventually(lambda: CHANGELOG not in admin.list_topics(timeout=10).topics, 30)
    (said,) = lost_topics(settings)
    assert f"join: {CHANGELOG} is gone" in said
    at = ["--bootstrap-server", own_broker.bootstrap]
    assert CliRunner().invoke(app, ["topics", "apply", "--yes", *at]).exit_code != 0
    assert CHANGELOG not in admin.list_topics(timeout=10).topics, "an empty one in its place would hide the loss"
    ensure_topics(settings)
    (said,) = lost_topics(settings)
    assert f"join: {CHANGELOG} was deleted and created again" in said
    assert CliRunner().invoke(app, ["topics", "diff", *at]).exit_code == ExitCode.PERMANENT
