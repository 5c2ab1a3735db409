"""A topic that was lost while nothing ran: commands name it, `topics apply` does not hide it, and `tentalis up` starts
nothing until the loss is accepted; then the whole stack goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from schemas import topics
from tentalis.cli.main import app
from tentalis.kafka import topic_client
from tentalis.kafka.config import client_config
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.lost_topics import lost_topics
from tentalis.ops.verify import verify
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.integration.streams.test_topic_loss import CHANGELOG, OPEN, heads, open_tasks, publish_tasks, run_once
from tests.support.inference_lab import make_model
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.recreated import delete

pytestmark = pytest.mark.broker


def test_up_names_a_lost_topic_and_goes_on_when_the_loss_is_accepted(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests/unit/kafka/test_known_topics.py holds the wait for a topic that is gone.
    monkeypatch.setattr(topic_client, "TOPIC_PATIENCE_S", 0.5)
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path / "home")
    ensure_topics(settings)
    assert lost_topics(settings) == []
    tasks = heads("task")
    publish_tasks(settings, tasks)
    open_tasks(settings, tasks)
    workers: list[JoinWorker] = []
    try:
        run_once(settings, workers, tmp_path)
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.end(kill=True)
    assert lost_topics(settings) == []
    delete(settings, CHANGELOG)
    (said,) = lost_topics(settings)
    assert f"join: {CHANGELOG} is gone" in said
    at = ["--bootstrap-server", own_broker.bootstrap]
    assert CliRunner().invoke(app, ["topics", "apply", "--yes", *at]).exit_code != 0
    there = AdminClient(client_config(settings)).list_topics(timeout=10).topics
    assert CHANGELOG not in there, "an empty one in its place would hide the loss"
    model = make_model(tmp_path / "tiny")
    own = {"TENTALIS_BOOTSTRAP": own_broker.bootstrap, "TENTALIS_HOME": str(settings.home)}
    up = [sys.executable, "-m", "tentalis.cli", "up", "--policy-model", str(model)]

    refused = subprocess.run(up, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == ExitCode.PERMANENT, refused.stderr[-3000:]
    assert f"join: {CHANGELOG} is gone" in refused.stderr and "--accept-loss" in refused.stderr, refused.stderr[-3000:]

    ensure_topics(settings)
    (said,) = lost_topics(settings)
    assert f"join: {CHANGELOG} was deleted and created again" in said
    assert CliRunner().invoke(app, ["topics", "diff", *at]).exit_code == ExitCode.PERMANENT

    delete(settings, CHANGELOG)
    delete(settings, topics.TOPIC_IDS)  # and with it the record by which losses are found
    log = tmp_path / "up.log"
    with log.open("wb") as sink:
        stack = subprocess.Popen([*up, "--accept-loss"], env=os.environ | own, stdout=sink, stderr=sink)
    try:
        eventually(
            lambda: verify(settings, "run").outcomes == {"given_up": OPEN}, 240, 1.0, lambda: log.read_text()[-3000:]
        )
        assert stack.poll() is None, log.read_text()[-3000:]
        assert f"{topics.TOPIC_IDS} is new, or was lost" in log.read_text()
    finally:
        stack.send_signal(signal.SIGTERM)
        assert stack.wait(120) == 0, log.read_text()[-3000:]
    assert [str(each) for each in verify(settings, "run").problems] == []
