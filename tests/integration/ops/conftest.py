"""A state directory with a supervisor in the test's own process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tentalis.local.child import marked
from tentalis.local.spec import ProcessSpec
from tentalis.local.state import StateDir
from tentalis.local.supervisor import Supervisor


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    with StateDir(tmp_path / "home") as state:
        yield state


@pytest.fixture
def supervise(state: StateDir) -> Iterator[Callable[..., Supervisor]]:
    running: list[Supervisor] = []

    def begin(*specs: ProcessSpec) -> Supervisor:
        running.append(Supervisor(state, specs))
        running[-1].start()
        return running[-1]

    yield begin
    for supervisor in running:
        supervisor.stop()
    assert marked(state.mark) == []
