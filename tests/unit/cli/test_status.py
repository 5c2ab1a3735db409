"""`tentalis status` names lost topics, shows the processes of a stack whose broker does not answer, and while watching
the times of the last steps."""

import json
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner, Result

from tentalis.cli import status
from tentalis.cli.main import app
from tentalis.cli.shared import step_times
from tentalis.cli.shared.step_times import StepTimesAnswer, StepTimesWatch
from tentalis.cli.status import LostTopicsAnswer
from tentalis.demo import step_reader
from tentalis.demo.recent_steps import StepTimes
from tentalis.demo.stats import PHASES
from tentalis.kafka.errors import Forbidden
from tentalis.kafka.topic_client import CommitsUnknown
from tentalis.local.state import StateDir
from tentalis.ops import cluster_status, lost_topics
from tentalis.ops.cluster_status import ClusterStatus
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import NoBroker, Settings
from tests.support.kafka_fixture import eventually

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


ROW = StepTimes("learn-1", "learn", 12, 10, dict.fromkeys(PHASES) | {"sampling": 8.25, "training": 3.0})


def test_the_phases_of_the_last_steps_are_a_table_with_a_dash_for_what_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    StepTimesAnswer((ROW,)).show()
    _, head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["RUN", "STEP", "MEDIAN", "OF", *(name.upper() for name in PHASES)]
    assert row.split() == ["learn-1", "12", "10", "steps", "8.2", "s", "-", "-", "3.0", "s", "-", "-"]
    StepTimesAnswer().show()
    assert capsys.readouterr().out == "\ntime per step: - (the log is being read)\n"
    StepTimesAnswer(()).show()
    assert "time per step: - (no run began or planned a step in the last 2 hours)" in capsys.readouterr().out


def test_the_phases_of_the_last_steps_for_programs() -> None:
    fields = StepTimesAnswer((ROW,)).fields()
    assert fields["step_times_unknown"] is None
    assert fields["step_times"] == [
        {"run": "learn-1", "policy": "learn", "step": 12, "steps": 10, "seconds_by_phase": ROW.seconds_by_phase}
    ]
    assert StepTimesAnswer(unknown="why").fields() == {"step_times": None, "step_times_unknown": "why"}


def test_the_phases_are_read_again_after_a_failure_and_stay_while_the_log_is_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    read: list[str | None] = []
    gate = threading.Semaphore(0)

    def settings() -> Settings:
        asked.append(1)
        if len(asked) == 1:
            raise NoBroker("no Kafka is known: none is configured")
        assert gate.acquire(timeout=60)
        return Settings(bootstrap="localhost:1")

    def reads(given: Settings) -> Generator[list[StepTimes] | None, None, None]:
        read.append(given.bootstrap)
        for found in (None, [ROW], []) if len(read) == 1 else (None,):
            yield found
            assert gate.acquire(timeout=60)
        if len(read) == 2:
            raise TimeoutError("no record for 60 s")

    monkeypatch.setattr(step_reader, "read_step_times", reads)
    monkeypatch.setattr(step_times, "RETRY_S", 0.01)
    watch = StepTimesWatch(settings)
    try:
        for answer in (
            StepTimesAnswer(unknown="no Kafka is known: none is configured"),
            StepTimesAnswer(),
            StepTimesAnswer((ROW,)),
            StepTimesAnswer(()),
        ):
            eventually(lambda answer=answer: watch.answer == answer)  # type: ignore[misc]
            gate.release()
        gate.release()
        eventually(lambda: len(read) == 2)
        assert watch.answer == StepTimesAnswer(()), "the window is read anew"
        gate.release()
        eventually(lambda: watch.answer == StepTimesAnswer(unknown="no record for 60 s"))
    finally:
        gate.release(10)
        watch.close()


def test_only_a_watch_reads_the_times_of_steps(shown: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_topics, "lost_topics", lambda _: [])
    monkeypatch.setattr(status, "StepTimesWatch", None)
    assert "step_times" not in json.loads(shown("-o", "json").stdout)
