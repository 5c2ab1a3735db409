"""A gateway measures the log-probs of its backends: a declaration that does not hold trains on nothing."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from schemas.records import LogprobsMode, SessionEvent
from tentalis.gateway.backends import logprobs
from tentalis.inference import logprobs_check
from tentalis.inference.logprobs_check import MENDING_FLAG
from tests.support.gateway_lab import Lab, ack, lab, wait_for
from tests.support.sampling_server import SamplingServer, sampling

RAW, PROCESSED, UNKNOWN = LogprobsMode.RAW, LogprobsMode.PROCESSED, LogprobsMode.UNKNOWN
BACKEND: dict[str, Any] = {"name": "local", "server_id": "local"}
POLICY: dict[str, Any] = {"name": "assistant", "backend": "local", "models": ["*"]}


def turn(gateway: Lab, temperature: float = 0.7, **more: Any) -> SessionEvent:
    gateway.deps.served.apply(ack("assistant", 1))
    answer = gateway.chat("x", temperature=temperature, **more)
    assert answer.status_code == 200
    event = gateway.log.events[-1]
    assert ("x-tentalis-task-id" in answer.headers) == (event.not_trainable == "")
    return event


@pytest.mark.parametrize(
    ("server", "declared", "temperature", "recorded", "reason"),
    [
        ({}, PROCESSED, 0.7, PROCESSED, ""),
        ({}, RAW, 0.7, PROCESSED, ""),
        ({"mode": "raw_logprobs"}, PROCESSED, 0.7, RAW, "as measured; it is declared as processed"),
        ({"mode": "raw_logprobs"}, PROCESSED, 1.0, PROCESSED, ""),
        ({"mode": "raw_logprobs"}, RAW, 0.7, RAW, "bare model (logprobs_mode: raw)"),
        ({"mode": "raw_logits"}, PROCESSED, 1.0, UNKNOWN, "neither the bare model nor the sampling"),
        ({"scores": False}, PROCESSED, 0.7, PROCESSED, ""),
        ({"names": False}, PROCESSED, 0.7, PROCESSED, ""),
        ({"tokenizes": False, "mode": "raw_logprobs"}, RAW, 1.0, PROCESSED, ""),
    ],
)
def test_the_measured_log_probs_count_and_the_declared_ones_only_where_nothing_can_be_measured(
    tmp_path: Path,
    server: dict[str, Any],
    declared: LogprobsMode,
    temperature: float,
    recorded: LogprobsMode,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    backend = SamplingServer(**server)
    with sampling(backend) as url, lab(tmp_path, backend_url=url, logprobs_mode=declared) as gateway:
        event = turn(gateway, temperature)
        assert event.logprobs_mode is recorded
        assert (event.not_trainable == "") == (reason == "") and reason in event.not_trainable
        told = [record.getMessage() for record in caplog.records if "the backend local at" in record.getMessage()]
        if backend.mode != "processed_logprobs" and backend.tokenizes:
            assert len(told) == 1 and MENDING_FLAG in told[0]
        elif not (backend.scores and backend.tokenizes and backend.names):
            assert len(told) == 1 and f"is declared to give {declared.value} log-probs, which cannot be" in told[0]
        else:
            assert not told
        assert gateway.http.get("/healthz").status_code == 200


def test_each_replica_is_measured_by_itself_and_again_when_it_has_been_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_WATCH_S", 0.1)
    monkeypatch.setattr(logprobs, "_RETRY_S", 0.1)
    models = ("base", "assistant@v1")
    first = SamplingServer(models=models)
    second = SamplingServer(mode="raw_logprobs", models=models, away=True)
    with ExitStack() as cleanup:
        urls = [cleanup.enter_context(sampling(each)) for each in (first, second)]
        backend = BACKEND | {"url": urls[0], "replicas": urls[1:], "logprobs_mode": "processed"}
        gateway = cleanup.enter_context(lab(tmp_path, backends=[backend], policies=[POLICY]))
        settings, modes = gateway.deps.settings.backends[0], gateway.deps.backends.logprobs
        wait_for(lambda: modes.mode(settings, urls[0]) is PROCESSED)
        assert modes.mode(settings, urls[1]) is None, "it does not answer"
        second.away = False
        wait_for(lambda: modes.mode(settings, urls[1]) is RAW)
        asked = [each.asked for each in (first, second)]
        first.away = True
        wait_for(lambda: modes.mode(settings, urls[0]) is None)
        assert "bare model" in turn(gateway).not_trainable, "the second answers"
        first.mode, first.away = "raw_logprobs", False
        wait_for(lambda: modes.mode(settings, urls[0]) is RAW)
        assert second.asked <= asked[1] + 1, "a replica that stays is measured once"


@pytest.mark.parametrize(("mends", "mode"), [(True, RAW), (False, PROCESSED)])
def test_a_server_that_fails_in_the_measurement_is_asked_again_and_counts_as_declared_if_it_fails_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mends: bool, mode: LogprobsMode
) -> None:
    monkeypatch.setattr(logprobs_check, "PAUSES_S", (0.1, 0.1))
    backend = SamplingServer(mode="raw_logprobs", broken=2 if mends else 3)
    with sampling(backend) as url, lab(tmp_path, backend_url=url, logprobs_mode=PROCESSED) as gateway:
        settings, modes = gateway.deps.settings.backends[0], gateway.deps.backends.logprobs
        wait_for(lambda: modes.mode(settings, url) is mode)


def test_a_turn_of_a_replica_that_has_just_come_back_waits_for_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_WATCH_S", 0.1)
    backend = SamplingServer(models=("base", "assistant@v1"))
    with sampling(backend) as url, lab(tmp_path, backend_url=url, logprobs_mode=PROCESSED) as gateway:
        settings, modes = gateway.deps.settings.backends[0], gateway.deps.backends.logprobs
        backend.away = True
        wait_for(lambda: modes.mode(settings, url) is None)
        backend.away = False
        event = turn(gateway)
        assert (event.logprobs_mode, event.not_trainable) == (PROCESSED, "")


def test_a_turn_of_a_replica_that_is_not_measured_yet_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_WATCH_S", 600.0)
    backend = SamplingServer()
    with sampling(backend) as url, lab(tmp_path, backend_url=url, logprobs_mode=PROCESSED) as gateway:
        for replica in gateway.deps.backends.logprobs._replicas.values():
            replica.measured = None
        event = turn(gateway)
        assert (event.logprobs_mode, event.not_trainable) == (
            UNKNOWN,
            "the log-probs of the backend local are not measured yet",
        )
