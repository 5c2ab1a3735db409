"""The environment that the supervisor gives a process."""

from pathlib import Path

import pytest

from tentalis.local.launcher import ProcessLauncher
from tentalis.local.process import SupervisedProcess
from tentalis.local.spec import ProcessSpec
from tentalis.local.state import StateDir


def accepted(launcher: ProcessLauncher, process: SupervisedProcess) -> bool:
    """True if the next start of a process accepts lost topics."""
    process.log_file.unlink(missing_ok=True)
    assert launcher.spawn(process).wait(30) == 0
    return "TENTALIS_ACCEPT_LOSS=1" in process.log_file.read_text()


def test_a_loss_is_accepted_until_the_process_was_ready_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_ACCEPT_LOSS", "1")
    with StateDir(tmp_path / "home") as state:
        launcher = ProcessLauncher(state)
        process = SupervisedProcess(ProcessSpec("join", ("env",)), tmp_path / "join.log", tmp_path / "beats")
        assert accepted(launcher, process)
        process.was_satisfied = True
        assert not accepted(launcher, process)
