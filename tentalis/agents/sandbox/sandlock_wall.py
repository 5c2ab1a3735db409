"""The wall of sandlock: Landlock and seccomp, without root, namespaces or a container engine.

Files outside the working folder, the operating system's programs and Python are out of reach. So are the network
(unless the limits allow an endpoint), signals to other processes, ptrace and mounts. Everything that a command started
ends with it, and with the process that holds the wall.
"""

import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

from sandlock import ExitReason, Process, Sandbox, SandlockError, StdioMode

from tentalis.agents.sandbox.streams import AttendedOutput
from tentalis.agents.sandbox.wall import (
    MIB,
    CommandEnd,
    CommandOutput,
    Limits,
    SandboxFault,
    limited_command,
    limited_server,
)

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
# Landlock has no rules for these: they would change files and processes of this user outside the folder, or, for root,
# make devices. So rights, owners, times and attributes of files cannot be changed inside the folder either.
DENIED_CALLS = (
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "utimensat", "futimesat"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    *("mknod", "mknodat", "chroot", "pivot_root"),
    *("setpriority", "ioprio_set", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"),
)


class SandlockWall:
    """See the module docstring. Raises SandboxFault if this machine cannot build the wall."""

    def __init__(self) -> None:
        self.name = f"sandlock/{version('sandlock')}"
        with tempfile.TemporaryDirectory(prefix="tentalis-wall-") as folder:
            probe = self.run(["/bin/echo", "ok"], Path(folder), Limits(time_s=20.0, memory_mb=256))
        if probe.stdout != b"ok\n":
            raise SandboxFault(f"sandlock runs no command here: {probe.stderr.decode(errors='replace').strip()}")

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
        process = self._popen(limited_command(command, limits, stdin), StdioMode.NULL, folder, limits, readable)
        with process:
            return _output(process, limits, stop or threading.Event())

    def start(
        self, command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = ()
    ) -> "ConfinedCommand":
        """See Wall.start."""
        return ConfinedCommand(self._popen(limited_server(command, limits), StdioMode.PIPED, folder, limits, readable))

    def _popen(
        self, command: Sequence[str], stdin: StdioMode, folder: Path, limits: Limits, readable: Sequence[Path]
    ) -> Process:
        allowed = [path for path in (*SYSTEM, str(Path(sys.base_prefix).resolve())) if Path(path).exists()]
        sandbox = Sandbox(
            fs_readable=[*allowed, *(str(path) for path in readable)],
            fs_writable=[str(folder), "/dev/null"],
            net_allow=list(limits.network),
            extra_deny_syscalls=list(DENIED_CALLS),
            clean_env=True,
            env={"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            max_memory=limits.memory_mb * MIB,
            max_processes=limits.processes,
            max_open_files=limits.open_files,
            no_coredump=True,
            cwd=str(folder),
        )
        try:
            return sandbox.popen(command, stdin=stdin, stdout=StdioMode.PIPED, stderr=StdioMode.PIPED)
        except (SandlockError, RuntimeError, OSError) as error:
            raise SandboxFault(
                f"sandlock could not start a command: {error}. In a container, its seccomp profile must allow "
                "pidfd_getfd and process_vm_readv: Docker's does with --cap-add SYS_PTRACE "
                "(docs/concepts/environments.md)"
            ) from error


class ConfinedCommand:
    """A running command behind the wall; see RunningCommand."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.stdin: IO[bytes] = process.stdin
        self.stdout: IO[bytes] = process.stdout
        self.stderr: IO[bytes] = process.stderr
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """See RunningCommand.close."""
        with self._lock:
            if not self._closed:
                self._process.kill()
                self._process.wait()
                self._closed = True
            for stream in (self.stdin, self.stdout, self.stderr):
                stream.close()


def _output(process: Process, limits: Limits, stop: threading.Event) -> CommandOutput:
    """Waits for the end of a command, or ends it at a limit."""
    attended = AttendedOutput((process.stdout, process.stderr), limits.output_bytes, process.kill, stop)
    found = process.wait(timeout=limits.time_s)
    stdout, stderr = attended.finish()
    if found.reason is None:
        raise SandboxFault(f"sandlock lost a command: {found.error}")
    if attended.overflowed:
        return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_OUTPUT, None)
    match found.reason:
        case ExitReason.TIMEOUT:
            return CommandOutput(stdout, stderr, CommandEnd.TIMED_OUT, None)
        case ExitReason.EXITED:
            return CommandOutput(stdout, stderr, CommandEnd.EXITED, found.exit_code)
    return CommandOutput(stdout, stderr, CommandEnd.KILLED, None)
