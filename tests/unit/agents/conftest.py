"""Fixtures of tests that run actions behind a wall, and of those that run a manager on a log in memory."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.records import Record
from tentalis.agents.manager import process
from tentalis.agents.sandbox import Wall
from tests.support.walls import available_wall


@pytest.fixture(scope="module")
def wall() -> Wall:
    return available_wall()


@pytest.fixture(autouse=True)
def ends_of_commands(caplog: pytest.LogCaptureFixture) -> None:
    """A test that fails shows the signal that ended a command."""
    caplog.set_level(logging.INFO, logger="tentalis.agents.sandbox")


@dataclass
class Log:
    """A log in memory: `read` comes with the next poll, `written`: what the manager sends."""

    read: list[Record]
    written: list[Record]
    confirmed: int = 0


@pytest.fixture
def manager_log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log([], [])

    class Reader:
        caught_up = True

        def __init__(self, *_: Any) -> None:
            pass

        def poll(self, timeout: float) -> list[tuple[SimpleNamespace, Record]]:
            new, log.read = log.read, []
            place = SimpleNamespace(topic="", partition=0, offset=0)
            return [(place, record) for record in new]

    class Publisher:
        def __init__(self, *_: Any) -> None:
            pass

        def send(self, topic: str, record: Record, *, traceparent: str | None = None) -> None:
            log.written.append(record)

        def flush(self) -> None:
            log.confirmed = len(log.written)

    monkeypatch.setattr(process, "Reader", Reader)
    monkeypatch.setattr(process, "Publisher", Publisher)
    return log
