"""`tentalis status` names lost topics, and shows the processes of a stack whose broker does not answer."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner, Result

from tentalis.cli import status
from tentalis.cli.main import app
from tentalis.cli.status import LostTopicsAnswer
from tentalis.kafka.errors import Forbidden
from tentalis.kafka.topic_client import CommitsUnknown
from tentalis.local.state import StateDir
from tentalis.ops import cluster_status, lost_topics
from tentalis.ops.cluster_status import ClusterStatus
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings

LOSS = "join: tentalis.halves.v1 was deleted and created again"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command, on a stack without any trouble in its processes."""
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    monkeypatch.setenv("TENTALIS_BOOTSTRAP", "localhost:1")
    running = {"running": True, "updated": time.time() + 600, "supervisor": 1, "processes": {}}
    monkeypatch.setattr(StateDir, "status", lambda _: running)
    return lambda *options: CliRunner().invoke(app, ["status", *options])


def test_a_lost_topic_is_named_and_is_trouble(shown: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_topics, "lost_topics", lambda _: [LOSS])
    found = shown()
    assert found.exit_code == ExitCode.ERROR and f"lost topic: {LOSS}" in found.stdout
    assert json.loads(shown("-o", "json").stdout)["lost_topics"] == [LOSS]
    monkeypatch.setattr(lost_topics, "lost_topics", lambda _: [])
    found = shown()
    assert found.exit_code == 0 and "lost" not in found.stdout


def test_a_broker_that_does_not_answer_hides_no_process_and_is_trouble(
    shown: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(status, "LOST_WITHIN_S", 0.01)
    monkeypatch.setattr(lost_topics, "lost_topics", lambda _: answered.wait(60) and [])
    found = shown()
    answered.set()
    assert found.exit_code == ExitCode.ERROR and "PROCESS" in found.stdout
    assert "lost topics: unknown (the broker did not answer within 0.01 s)" in found.stdout


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)), "All broker connections are down"),
        (CommitsUnknown("the committed offsets of group tentalis-join are not available"), "of group tentalis-join"),
        (Forbidden("User:ann may not describe group tentalis-join"), "User:ann may not"),
        (TimeoutError(), "did not answer in time"),
        (ZeroDivisionError("a mistake of ours"), "ZeroDivisionError: a mistake of ours"),
    ],
)
def test_the_reason_is_shown_if_lost_topics_are_unknown(
    shown: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fails(_: object) -> list[str]:
        raise error

    monkeypatch.setattr(lost_topics, "lost_topics", fails)
    found = shown()
    assert found.exit_code == ExitCode.ERROR and reason in found.stdout
    fields = json.loads(shown("-o", "json").stdout)
    assert fields["lost_topics"] is None and reason in fields["lost_topics_unknown"]


@pytest.mark.parametrize(
    ("answer", "code"), [(LostTopicsAnswer(), 0), (LostTopicsAnswer((LOSS,)), 1), (LostTopicsAnswer(unknown="why"), 1)]
)
def test_a_cluster_with_unknown_lost_topics_is_trouble(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: LostTopicsAnswer, code: int
) -> None:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    monkeypatch.setattr(status, "connected_settings", lambda _: Settings(bootstrap="localhost:1"))
    monkeypatch.setattr(cluster_status, "read_cluster", lambda _: ClusterStatus("localhost:1", [], [], []))
    monkeypatch.setattr(status, "_ask_for_lost_topics", lambda _: answer)
    found = CliRunner().invoke(app, ["status", "--bootstrap-server", "localhost:1"])
    assert found.exit_code == code, found.output
    assert ("unknown (why)" in found.stdout) == bool(answer.unknown)
