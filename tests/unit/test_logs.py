"""What processes log: at the level that is named, and sparingly while a broker is away."""

import logging
import os
import subprocess
import sys

import pytest

from tentalis.logs import BadLevel, Sparing, configure


def test_a_chatty_logger_is_thinned_out_and_says_so() -> None:
    sparing = Sparing(("aiokafka",), interval=10.0)

    def passes(at: float, name: str = "aiokafka.client") -> tuple[bool, str]:
        record = logging.LogRecord(name, logging.ERROR, "f", 1, "no node %s", (1,), None)
        record.created = at
        return sparing.filter(record), record.getMessage()

    assert passes(100.0) == (True, "no node 1")
    assert [passes(100.0 + step)[0] for step in (1, 5, 9)] == [False] * 3
    assert passes(111.0) == (True, "no node 1 (and 3 times before)")
    assert passes(111.0, "streams.app")[0] and passes(111.0, "streams.app")[0]


def test_each_client_of_librdkafka_that_cannot_connect_is_named_once_not_twenty_times_a_second() -> None:
    sparing = Sparing(("librdkafka",), interval=10.0)

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
    with pytest.raises(BadLevel, match="TENTALIS_LOG=LOUD is no level"):
        configure()
