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
from tentalis.agents.sandbox.wall import CommandEnd, CommandOutput, Limits, SandboxFault, limited_command


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
        try:
            process = subprocess.Popen(
                limited_command(command, limits, stdin),
                cwd=folder,
                env={"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxFault(f"a command could not be started: {error}") from error
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


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
