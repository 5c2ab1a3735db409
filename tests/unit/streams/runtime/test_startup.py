"""The exit code of an application whose broker is gone again before its topics were looked up."""

import logging
from pathlib import Path

import pytest

from streams.runtime import startup
from streams.runtime.worker import StreamSettings, run
from tentalis.local.ports import free_port
from tentalis.service import logs
from tests.support.counting_app import CountingProcessor


def test_a_start_without_a_broker_ends_with_the_code_for_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "TOPICS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(logs, "configure", lambda: None)  # pytest's handler stays
    settings = StreamSettings(bootstrap=f"127.0.0.1:{free_port()}", state_dir=tmp_path)
    with caplog.at_level(logging.CRITICAL, logger="streams.runtime.worker"):
        assert run(CountingProcessor("app", "in"), settings) == 4
    assert f"app cannot start: no Kafka answers at {settings.bootstrap}" in caplog.text
