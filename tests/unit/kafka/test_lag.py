"""The lag is read at intervals, or when somebody asks for it."""

import threading
from collections.abc import Callable

import pytest

from tentalis.kafka import lag
from tentalis.kafka.lag import LagProbe
from tentalis.service.settings import Settings


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The readings of the lag so far: each finds one record more."""
    done: list[int] = []

    def read(*_: object) -> dict[str, int]:
        done.append(len(done) + 1)
        return {"group": done[-1]}

    monkeypatch.setattr(lag, "consumer_lags", read)
    return done


def ended(probe: LagProbe) -> Callable[[], None]:
    def end() -> None:
        probe.stop()
        probe._thread.join(10)
        assert not probe._thread.is_alive()

    return end


def test_a_probe_on_request_reads_only_when_it_is_asked(
    readings: list[int], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "ASK_S", 60.0)
    probe = LagProbe(Settings(bootstrap="nowhere:1"), {}, every_s=1000, on_request=True)
    probe.ask()
    assert not readings and not probe.reachable, "it was not started"
    probe.start()
    request.addfinalizer(ended(probe))
    assert not readings
    probe.ask()
    assert probe.lags == {"group": 1} and probe.reachable
    probe.ask()
    assert readings == [1], "the latest reading is new enough"
    probe._every_s = 0.0
    probe.ask()
    assert probe.lags == {"group": 2}


def test_whoever_asks_does_not_wait_for_a_broker_that_does_not_answer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def read(*_: object) -> dict[str, int]:
        answers.wait(60)
        return {}

    monkeypatch.setattr(lag, "consumer_lags", read)
    monkeypatch.setattr(lag, "ASK_S", 0.05)
    probe = LagProbe(Settings(bootstrap="nowhere:1"), {}, on_request=True)
    probe.start()
    request.addfinalizer(ended(probe))
    request.addfinalizer(answers.set)
    probe.ask()
    assert not probe.reachable
