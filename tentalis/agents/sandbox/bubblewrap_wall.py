"""The wall of bubblewrap: namespaces of mounts, processes, users and networks, and a filter of system calls.

For machines whose kernel is too old for sandlock. A command sees the operating system's programs, Python and its folder
and nothing else: other files, processes and networks do not exist for it. Its first process (`bubblewrap_init`) counts
its memory and ends it when this process closes a pipe or is gone.

bubblewrap is the program `bwrap` of the system. It needs user namespaces, and an ordinary user: Linux does not limit
the processes of root.
"""

import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tentalis.agents.sandbox import bubblewrap_init
from tentalis.agents.sandbox.folder_watch import FolderWatch
from tentalis.agents.sandbox.streams import AttendedOutput
from tentalis.agents.sandbox.syscall_filter import bubblewrap_filter
from tentalis.agents.sandbox.wall import (
    MIB,
    SYSTEM,
    CommandEnd,
    CommandOutput,
    Limits,
    SandboxFault,
    command_variables,
)

log = logging.getLogger(__name__)

_PYTHON = str(Path(sys.executable).resolve())
_INIT = Path(bubblewrap_init.__file__).resolve()
_FURTHER = tuple(map(Path, ("/etc/alternatives",)))
"""Links in /usr lead there."""
# Without /dev/zero: what is mapped from it and shared is memory that no process shows.
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/full")
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1"}
_LINKS["/dev/stderr"] = "/proc/self/fd/2"
_NAMESPACES = ("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1")
_END_S = 30.0
"""A command that was killed has ended after so long, or the machine is broken."""


class BubblewrapWall:
    """See the module docstring. Raises SandboxFault if this machine cannot build the wall."""

    def __init__(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxFault("the program bwrap is missing (install the package bubblewrap)")
        if platform.machine() != "x86_64":
            raise SandboxFault(f"bubblewrap is used on x86-64 only, and this is {platform.machine()}")
        if os.geteuid() == 0:
            raise SandboxFault("bubblewrap confines commands of ordinary users only, and this process is root")
        self._program = program
        self.name = f"bubblewrap/{_version(program)}"
        self.readable = [path for path in (*SYSTEM, *_FURTHER, Path(sys.base_prefix).resolve()) if path.exists()]
        self._probe()

    def _probe(self) -> None:
        """Runs a command that tries to start a second process. Raises SandboxFault."""
        command = ["/bin/sh", "-c", "echo ok; /bin/true && echo forked"]
        with tempfile.TemporaryDirectory(prefix="tentalis-wall-") as folder:
            found = self.run(command, Path(folder), Limits(time_s=20.0, memory_mb=256, processes=1))
        if found.stdout == b"ok\nforked\n":
            raise SandboxFault("bubblewrap needs a kernel that counts processes per namespace (Linux 5.14)")
        if found.stdout != b"ok\n":
            raise SandboxFault(f"bubblewrap runs no command here: {found.stderr.decode(errors='replace').strip()}")

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
        """See Wall.run."""
        running = self._started(command, folder, limits, readable, str(stdin or os.devnull))
        streams = running.stdout, running.stderr
        attended = AttendedOutput(streams, limits.output_bytes, running.kill, stop or threading.Event())
        disk = FolderWatch(folder, limits, running.kill)
        try:
            timed_out = not running.ended_within(limits.time_s)
            running.end()
            stdout, stderr = attended.finish()
        finally:
            disk.end()
            running.close()
        began, _, ending = running.report().partition(b"\n")
        if began != bubblewrap_init.BEGAN:
            raise SandboxFault(f"bubblewrap could not start a command: {stderr.decode(errors='replace').strip()}")
        if attended.overflowed:
            return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_OUTPUT, None)
        if timed_out:
            return CommandOutput(stdout, stderr, CommandEnd.TIMED_OUT, None)
        if disk.exceeded:
            return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_DISK, None)
        word, _, number = ending.partition(b" ")
        if word == bubblewrap_init.EXITED:
            return CommandOutput(stdout, stderr, CommandEnd.EXITED, int(number))
        log.info("a command was ended by %s", signal.Signals(int(number or signal.SIGKILL)).name)
        return CommandOutput(stdout, stderr, CommandEnd.KILLED, None)

    def start(
        self, command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = ()
    ) -> "NamespacedCommand":
        """See Wall.start."""
        return self._started(command, folder, limits, readable, None)

    def _started(
        self, command: Sequence[str], folder: Path, limits: Limits, readable: Sequence[Path], stdin: str | None
    ) -> "NamespacedCommand":
        """Starts a command. `stdin`: the file that it reads; None: a pipe. Raises SandboxFault."""
        if limits.network:
            raise SandboxFault(
                f"bubblewrap allows no network, and the limits allow {', '.join(limits.network)}: remove them, or use "
                "a machine with sandlock"
            )
        (held, lifeline), (reported, report) = os.pipe(), os.pipe()
        spec = {
            "command": [str(word) for word in command],
            "stdin": stdin,
            "limits": _resource_limits(limits),
            "memory_bytes": limits.memory_mb * MIB,
            "filter": bubblewrap_filter().hex(),
            "lifeline": held,
            "report": report,
        }
        words = [self._program, *_NAMESPACES, *self._view(folder, readable), "--"]
        try:
            process = subprocess.Popen(
                [*words, _PYTHON, "-I", "-S", str(_INIT), json.dumps(spec)],
                env=command_variables(folder),
                stdin=subprocess.PIPE if stdin is None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(held, report),
            )
        except (OSError, ValueError) as error:
            os.close(lifeline)
            os.close(reported)
            raise SandboxFault(f"bubblewrap could not start a command: {error}") from error
        finally:
            os.close(held)
            os.close(report)
        return NamespacedCommand(process, lifeline, reported)

    def _view(self, folder: Path, readable: Sequence[Path]) -> list[str]:
        """Returns the options for the files that a command sees. All of them are read-only but its folder."""
        inside = folder.resolve()
        options = ["--hostname", "sandbox", "--proc", "/proc"]
        for device in _DEVICES:
            options += ["--dev-bind", device, device]
        for link, target in _LINKS.items():
            options += ["--symlink", target, link]
        # A folder hides what was mounted below it before.
        for path in sorted({place for each in (*self.readable, *readable, _INIT) for place in (each, each.resolve())}):
            if not path.is_relative_to(inside):
                options += ["--ro-bind", str(path.resolve()), str(path)]
        for path in {folder, inside}:
            options += ["--bind", str(inside), str(path)]
        return [*options, "--remount-ro", "/", "--chdir", str(folder)]


def _version(program: str) -> str:
    """Returns the version that the program names. Raises SandboxFault."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFault(f"bubblewrap does not run: {error}") from error
    return done.stdout.split()[-1]


def _resource_limits(limits: Limits) -> dict[str, int]:
    """Returns the limits of each process by their names in the module `resource`. The supervising process counts as one
    of the processes."""
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_mb * MIB,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_DATA": limits.memory_mb * MIB,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": limits.processes + 1,
    }


class NamespacedCommand:
    """A running command behind the wall; see RunningCommand."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int, reported: int) -> None:
        """`lifeline`: the end of the pipe that keeps the command alive; `reported`: that of the supervisor's report."""
        assert process.stdout is not None and process.stderr is not None
        self._process, self._lifeline, self._reported = process, lifeline, reported
        self._stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._lock = threading.Lock()
        self._killed = self._closed = False

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its input. Only a command of `start` has one."""
        assert self._stdin is not None
        return self._stdin

    def kill(self) -> None:
        """Lets the supervisor end, and with it everything that the command started. Does not wait."""
        with self._lock:
            if not self._killed:
                self._killed = True
                os.close(self._lifeline)

    def ended_within(self, seconds: float) -> bool:
        """Waits for the end of everything that the command started. Returns False if it did not come in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kills the command and waits for the end of everything that it started. Raises SandboxFault if it does not
        come."""
        self.kill()
        if not self.ended_within(_END_S):
            raise SandboxFault(f"a command did not end in {_END_S:.0f} s after it was killed")

    def close(self) -> None:
        """See RunningCommand.close. Raises SandboxFault if the command does not end."""
        self.end()
        with self._lock:
            if not self._closed:
                self._closed = True
                with os.fdopen(self._reported, "rb") as report:
                    self._report = report.read()
        for stream in (self._stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def report(self) -> bytes:
        """Returns what the supervisor reported, after `close`."""
        return self._report
