"""The manager's feedback: a turn of its loop, which is its sign of life, ends soon although users are slow."""

from typing import Any

import pytest

from schemas.records import Feedback, Result
from tentalis.agents.manager import process
from tentalis.agents.manager.core import feedback_id_of
from tentalis.agents.manager.process import Manager, ManagerOptions
from tentalis.agents.scenarios import make_scenario
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, feedback_on, manifest, result, task
from tests.unit.agents.conftest import Log

ANSWERS = 5
HINT_S = 20.0


class Clock:
    """The time of the manager."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class SlowUser:
    """Users whose feedback takes `HINT_S` each."""

    owes_feedback, n_samples, name, environment = True, ANSWERS, "slow", "chat"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        self._clock.now += HINT_S
        return feedback_on(result, feedback_id)


@pytest.fixture
def log(manager_log: Log) -> Log:
    of = task(n=ANSWERS)
    manager_log.read = [manifest(), of, *(result(of, index) for index in range(ANSWERS))]
    return manager_log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(process, "time", clock)
    return clock


def test_slow_feedback_is_written_in_a_turn_by_itself(log: Log, clock: Clock) -> None:
    user: Any = SlowUser(clock)
    manager = Manager(ManagerOptions(RUN, "slow"), Settings(), user)
    for turn in range(ANSWERS):
        assert not manager.step()
        assert (len(log.written), log.confirmed) == (turn + 1, turn + 1)
    assert not manager.step() and len(log.written) == ANSWERS, "nothing is written twice"


def test_quick_feedback_is_written_in_one_turn(log: Log, clock: Clock) -> None:
    results = [record for record in log.read if isinstance(record, Result)]
    manager = Manager(ManagerOptions(RUN, "assistant"), Settings(), make_scenario("assistant"))
    manager.step()
    assert [record.event_id for record in log.written] == [feedback_id_of(each.result_id) for each in results]
    assert not manager.state.owed()
