"""Starts the processes of the stack with their log, mark and heartbeat folder, and ends what they leave behind."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path
from typing import IO

from tentalis.local import child
from tentalis.local.logfiles import START
from tentalis.local.process import SupervisedProcess
from tentalis.local.state import StateDir
from tentalis.service import variables
from tentalis.service.heartbeat import VARIABLE

log = logging.getLogger(__name__)


class ProcessLauncher:
    """Starts children of one supervisor. All calls come from the thread whose end ends the children."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._keeper: subprocess.Popen[bytes] | None = None

    def mark(self, process: SupervisedProcess) -> str:
        """Returns the mark in the environment of the current start of a process and of its descendants."""
        return f"{self._state.own_mark}{process.spec.name}/{process.starts}/"

    def spawn(self, process: SupervisedProcess) -> subprocess.Popen[bytes]:
        """Starts a process. Raises OSError."""
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **process.spec.env,
            child.MARK: self.mark(process),
        }
        if process.was_satisfied:  # a loss is accepted once, at the start for which it was asked
            environment.pop(variables.ACCEPT_LOSS.name, None)
        if process.beats is not None:
            process.beats.clear()
            environment[VARIABLE] = str(process.beats.folder)
        if process.spec.log_level:
            environment[variables.LOG_LEVEL_FILE.name] = str(self.level_file(process))
        with _open_log(process.log_file) as output:
            process.log_start = output.tell()
            output.write(f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(process.spec.argv)}\n".encode())
            output.flush()
            return subprocess.Popen(
                [*child.command(), "exec", str(os.getpid()), *process.spec.argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops the processes in order
            )

    def level_file(self, process: SupervisedProcess) -> Path:
        """Returns the file from which a process takes its log level."""
        return self._state.folder("levels") / process.spec.name

    def forget_levels(self) -> None:
        """Removes the log levels that operators set in an earlier stack."""
        for file in self._state.folder("levels").iterdir():
            file.unlink()

    def kill_descendants(self, process: SupervisedProcess) -> None:
        """Kills what an ended process left: its children must not outlive it or hold its ports."""
        try:
            child.kill_marked(self.mark(process))
        except TimeoutError as error:  # blocked in the kernel by a disk: the other processes continue
            log.error("%s: %s", process.spec.name, error)

    def keep_keeper(self) -> None:
        """Starts the process that kills all others if the supervisor is killed (see child.py)."""
        if self._keeper is not None and self._keeper.poll() is None:
            return
        self._keeper = subprocess.Popen(
            [*child.command(), "keep", self._state.own_mark],
            env={name: value for name, value in os.environ.items() if name != child.MARK},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends the keeper."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait()


def _open_log(path: Path) -> IO[bytes]:
    return path.open("ab")
