"""Requests of an operator to a supervisor that is busy, and to one whose asker has left."""

from pathlib import Path

import pytest

from tentalis.local import control
from tentalis.local import supervisor as supervising
from tentalis.local.control import ControlError, ControlRequest, ControlServer, Statuses, ask
from tentalis.local.process import Life
from tentalis.local.spec import ProcessSpec
from tentalis.local.state import StateDir
from tentalis.local.supervisor import Supervisor
from tests.support.kafka_fixture import eventually

STOP = ControlRequest("stop", ("join",))


def test_a_request_that_was_given_up_is_not_carried_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_REQUEST_S", 0.05)
    supervisor = Supervisor(StateDir(tmp_path), [ProcessSpec("join", ["sleep", "600"])])
    with pytest.raises(ControlError, match="nothing was done"):  # its thread does not run
        supervisor.request(STOP)
    supervisor._carry_out_requests()
    assert supervisor._processes["join"].life is Life.PENDING


def test_a_request_whose_asker_has_left_is_not_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ControlRequest] = []

    def busy(request: ControlRequest) -> Statuses:
        asked.append(request)
        if len(asked) == 1:
            monkeypatch.setattr(control, "_ANSWER_S", 0.2)
            with pytest.raises(ControlError, match="does not answer"):
                ask(tmp_path, STOP)
            monkeypatch.setattr(control, "_ANSWER_S", 20.0)
        return {}

    server = ControlServer(tmp_path, busy)
    first, last = ControlRequest("restart", ("join",)), ControlRequest("start", ("join",))
    assert ask(tmp_path, first) == {} == ask(tmp_path, last)
    eventually(lambda: last in asked, 10)
    assert asked == [first, last]
    server.close()
