"""No wall: commands run as this user, with limits of time, CPU, file size and output alone.

For tools that the operator wrote and trusts, on a machine without a wall. It is never chosen by itself.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tentalis.agents.sandbox.streams import AttendedOutput
from tentalis.agents.sandbox.wall import (
    CommandEnd,
    CommandOutput,
    Limits,
    SandboxFault,
    command_variables,
    limited_command,
    limited_server,
)


class NoWall:
    """Runs commands unconfined; see the module docstring."""

    name = "none"
    readable = (Path("/"),)

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        limits: Limits,
        *,
        stdin: Path | None = None,
        readable: Sequence[Path] = (),
        stop: threading.Event | None = None,
    ) -> CommandOutput:
        """See Wall.run. Everything is readable; memory, processes, files and the network are not limited."""
        process = _popen(limited_command(command, limits, stdin), folder, subprocess.DEVNULL)
        assert process.stdout is not None and process.stderr is not None
        attended = AttendedOutput(
            (process.stdout, process.stderr),
            limits.output_bytes,
            partial(_kill_group, process.pid),
            stop or threading.Event(),
        )
        timed_out = False
        try:
            process.wait(limits.time_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        _kill_group(process.pid)
        process.wait()
        stdout, stderr = attended.finish()
        if attended.overflowed:
            return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_OUTPUT, None)
        if timed_out:
            return CommandOutput(stdout, stderr, CommandEnd.TIMED_OUT, None)
        if process.returncode < 0:
            return CommandOutput(stdout, stderr, CommandEnd.KILLED, None)
        return CommandOutput(stdout, stderr, CommandEnd.EXITED, process.returncode)

    def start(
        self, command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = ()
    ) -> "UnconfinedCommand":
        """See Wall.start. If this process is killed, the command sees the end of its input; nothing else ends it."""
        return UnconfinedCommand(_popen(limited_server(command, limits), folder, subprocess.PIPE))


class UnconfinedCommand:
    """A running command without a wall; see RunningCommand."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._lock = threading.Lock()

    def close(self) -> None:
        """See RunningCommand.close. A process that the command moved to another group is not found."""
        with self._lock:
            if self._process.returncode is None:
                _kill_group(self._process.pid)
                self._process.wait()
            for stream in (self.stdin, self.stdout, self.stderr):
                stream.close()


def _popen(command: Sequence[str], folder: Path, stdin: int) -> subprocess.Popen[bytes]:
    """Starts a command in a separate process group. Raises SandboxFault."""
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=command_variables(folder),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxFault(f"a command could not be started: {error}") from error


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
