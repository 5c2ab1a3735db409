"""The logs of processes: at the level that is named, and few lines while a broker is unavailable."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tentalis.demo.play import log_to
from tentalis.kafka.config import client_config
from tentalis.service.logs import LevelFollower, RateLimitFilter, configure
from tentalis.service.settings import Settings
from tentalis.service.variable import BadVariable
from tests.support.kafka_fixture import eventually


def test_a_chatty_logger_is_thinned_out_and_says_so() -> None:
    sparing = RateLimitFilter(("aiokafka",), interval=10.0)

    def passes(at: float, name: str = "aiokafka.client") -> tuple[bool, str]:
        record = logging.LogRecord(name, logging.ERROR, "f", 1, "no node %s", (1,), None)
        record.created = at
        return sparing.filter(record), record.getMessage()

    assert passes(100.0) == (True, "no node 1")
    assert [passes(100.0 + step)[0] for step in (1, 5, 9)] == [False] * 3
    assert passes(111.0) == (True, "no node 1 (and 3 times before)")
    assert passes(111.0, "streams.runtime.worker")[0] and passes(111.0, "streams.runtime.worker")[0]


def test_each_client_of_librdkafka_that_cannot_connect_is_named_once_not_twenty_times_a_second() -> None:
    sparing = RateLimitFilter(("librdkafka",), interval=10.0)

    def passes(at: float, client: int, text: str) -> tuple[bool, str]:
        # As confluent-kafka hands it over: one format for everything.
        arguments = ("FAIL", f"rdkafka#consumer-{client}", text)
        record = logging.LogRecord("librdkafka", logging.ERROR, "f", 1, "%s [%s] %s", arguments, None)
        record.created = at
        return sparing.filter(record), record.getMessage()

    refused = "Connect to ipv4#127.0.0.1:9092 failed: Connection refused (after {}ms in state CONNECT)"
    assert passes(100.0, 1, refused.format(0))[0]
    assert not passes(100.1, 1, refused.format(3))[0]
    assert not passes(100.2, 2, refused.format(0))[0]
    assert passes(100.3, 1, "Authentication failed")[0], "another message is not left out for it"
    assert passes(111.0, 1, refused.format(0)) == (
        True,
        "FAIL [rdkafka#consumer-1] " + refused.format(0) + " (and 2 times before)",
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_says_no_more_of_an_unreachable_broker_than_other_commands(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("librdkafka"), "filters", [])
    logger = client_config(Settings(bootstrap="127.0.0.1:1"))["logger"]
    try:
        log_to(Console(force_terminal=terminal, file=sys.stderr))
        for number in range(1000):
            text = f"Connect to ipv4#127.0.0.1:9092 failed: Connection refused (after {number}ms in state CONNECT)"
            logger.error("%s [%s] %s", "FAIL", f"rdkafka#consumer-{number}", text)
        assert capsys.readouterr().err.count("FAIL") == 1
    finally:
        configure()


def test_a_level_in_small_letters_is_one_for_every_process() -> None:
    for command in (
        ["-m", "tentalis.cli", "version"],
        ["-m", "trainer", "train", "--config", "/missing", "--ranks", "1"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "TENTALIS_LOG": "warning"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "level" not in done.stderr, done.stderr


def test_what_is_no_level_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_LOG", "loud")
    with pytest.raises(BadVariable, match="TENTALIS_LOG=loud: give DEBUG, INFO"):
        configure()


FOLLOWING = """
import logging, time
from tentalis.service.logs import configure
configure("WARNING")
configure("INFO")
while True:
    logging.getLogger("a").debug("fine"); logging.getLogger("a").info("coarse"); time.sleep(0.05)
"""


def test_a_running_process_follows_the_level_in_its_file(tmp_path: Path) -> None:
    file, said = tmp_path / "level", tmp_path / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWING], env={**os.environ, "TENTALIS_LOG_LEVEL_FILE": str(file)}, stderr=output
        )
    try:
        eventually(lambda: "INFO a: coarse" in said.read_text(), 20)
        assert "fine" not in said.read_text()
        file.write_text("DEBUG")
        eventually(lambda: "DEBUG a: fine" in said.read_text(), 20)
        file.write_text("loud")  # is not one
        file.unlink()
        eventually(lambda: "the log level is now INFO" in said.read_text(), 20)
        file.write_text("ERROR")
        eventually(lambda: "the log level is now ERROR" not in said.read_text() and _still(said), 20)
    finally:
        process.kill()
        process.wait()


def _still(file: Path) -> bool:
    size = file.stat().st_size
    time.sleep(0.3)
    return file.stat().st_size == size


def test_the_level_in_the_file_holds_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "level").write_text("ERROR")
    follower = LevelFollower(tmp_path / "level")
    before = logging.getLogger().level
    try:
        follower.look()
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(before)
