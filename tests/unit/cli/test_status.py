"""`tentalis status` names lost topics, and shows the processes of a stack whose broker does not answer."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tentalis.cli import status
from tentalis.cli.main import app
from tentalis.local.state import StateDir
from tentalis.ops import lost_topics
from tentalis.service.exit_codes import ExitCode

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


def test_a_broker_that_does_not_answer_hides_no_process(
    shown: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(status, "LOST_WITHIN_S", 0.01)
    monkeypatch.setattr(lost_topics, "lost_topics", lambda _: answered.wait(60) and [])
    found = shown()
    answered.set()
    assert found.exit_code == 0 and "lost topics: unknown" in found.stdout
