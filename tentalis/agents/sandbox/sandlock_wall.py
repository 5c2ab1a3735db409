"""The wall of sandlock: Landlock and seccomp, without root, namespaces or a container engine.

Files outside the working folder, the operating system's programs and Python are out of reach. So are the network
(unless the limits allow an endpoint), signals to other processes, ptrace and mounts. Everything that a command started
ends with it, and with the process that holds the wall. On x86-64 a filter of our own (`syscall_filter`) refuses files
with a set-user-id bit and shared memory without a file.
"""

import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

from sandlock import ExitReason, Process, Result, Sandbox, SandlockError, StdioMode

from tentalis.agents.sandbox.abandoned import mark
from tentalis.agents.sandbox.attributes import FILE_CALLS, FileAttributes, Leader, OwnLimits
from tentalis.agents.sandbox.filtered_thread import FilteredThread
from tentalis.agents.sandbox.folder_watch import FolderWatch
from tentalis.agents.sandbox.streams import AttendedOutput, OutputPipes
from tentalis.agents.sandbox.wall import (
    MIB,
    SYSTEM,
    CommandEnd,
    CommandOutput,
    Limits,
    SandboxFault,
    command_variables,
    limited_command,
    limited_server,
)

log = logging.getLogger(__name__)

_DEVICES = tuple(map(Path, ("/dev/null", "/dev/zero", "/dev/urandom")))
# Calls that change files and processes of this user outside of the folder, and for which Landlock has no rules. Those
# that commands need inside of the folder are answered in `attributes`.
DENIED_CALLS = (
    # Root may call these too: mounts, events of all files, the log of the kernel.
    *("open_tree", "open_tree_attr", "fsopen", "fspick", "fsconfig", "fsmount", "mount_setattr", "fanotify_init"),
    *("syslog", "vhangup"),
    *("utime", "utimes", "futimesat", "file_setattr", "mknod", "mknodat", "chroot", "pivot_root"),
    *(
        "setrlimit",
        "setpriority",
        "ioprio_set",
        "sched_setaffinity",
        "sched_setscheduler",
        "sched_setparam",
        "sched_setattr",
    ),
)
_PIPES = {"stdin": StdioMode.PIPED, "stdout": StdioMode.PIPED, "stderr": StdioMode.PIPED}
_BEGIN = 'cd . && exec >"$0" 2>"$1" && shift && exec "$@"'
"""Makes the process known (see `attributes.Leader`), and sends its output to two pipes."""


class SandlockWall:
    """See the module docstring. Raises SandboxFault if this machine cannot build the wall."""

    def __init__(self) -> None:
        self.name = f"sandlock/{version('sandlock')}"
        self.readable = [path for path in (*SYSTEM, *_DEVICES, Path(sys.base_prefix).resolve()) if path.exists()]
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
        with OutputPipes() as pipes:
            sandbox = self._sandbox(folder, limits, readable, writable=pipes.paths)
            begun = ["/bin/sh", "-c", _BEGIN, *map(str, pipes.paths), *limited_command(command, limits, stdin)]
            return _run(sandbox, begun, folder, limits, pipes, stop or threading.Event())

    def start(
        self, command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = ()
    ) -> "ConfinedCommand":
        """See Wall.start. sandlock answers no calls of a command that keeps its pipes: those that change rights,
        owners, times and attributes of files are denied, also in the folder. Not stopped are prlimit on other processes
        of this user, requests of ioctl that change flags of readable files, and openat2, which may set a set-user-id
        bit in the folder."""
        sandbox = self._sandbox(folder, limits, readable, denied=FILE_CALLS)
        thread = FilteredThread(lambda: sandbox.popen(limited_server(command, limits), **_PIPES))
        try:
            return ConfinedCommand(thread)
        except (SandlockError, RuntimeError, OSError) as error:
            raise _not_started(error) from error

    def _sandbox(
        self,
        folder: Path,
        limits: Limits,
        readable: Sequence[Path],
        *,
        writable: Sequence[Path] = (),
        denied: Sequence[str] = (),
    ) -> Sandbox:
        return Sandbox(
            fs_readable=[str(path) for path in (*self.readable, *readable)],
            fs_writable=[str(folder), "/dev/null", *map(str, writable)],
            net_allow=list(limits.network),
            extra_deny_syscalls=[*DENIED_CALLS, *denied],
            clean_env=True,
            env=command_variables(folder),
            max_memory=limits.memory_mb * MIB,
            max_processes=limits.processes,
            max_open_files=limits.open_files,
            no_coredump=True,
            cwd=str(folder),
        )


def _not_started(error: Exception) -> SandboxFault:
    return SandboxFault(
        f"sandlock could not start a command: {error}. In a container, its seccomp profile must allow pidfd_getfd and "
        "process_vm_readv: Docker's does with --cap-add SYS_PTRACE (docs/concepts/environments.md)"
    )


class ConfinedCommand:
    """A running command behind the wall; see RunningCommand."""

    def __init__(self, thread: FilteredThread[Process]) -> None:
        """`thread`: starts the command."""
        self._thread = thread
        self._process = process = thread.result()
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
                self._thread.end()
                self._closed = True
            for stream in (self.stdin, self.stdout, self.stderr):
                stream.close()


def _run(
    sandbox: Sandbox,
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    pipes: OutputPipes,
    stop: threading.Event,
) -> CommandOutput:
    """Runs a command to its end, or ends it at a limit."""
    leader = Leader()
    attended = AttendedOutput(pipes.read, limits.output_bytes, leader.kill, stop)
    timed_out = threading.Event()

    def time_is_over() -> None:
        timed_out.set()
        leader.kill()

    timer = threading.Timer(limits.time_s, time_is_over)
    timer.daemon = True
    timer.start()
    disk = FolderWatch(folder, limits, leader.kill)
    limited = OwnLimits(marked=mark() is not None)
    answers = {**FileAttributes(folder).answers(), "chdir": leader.answer(), "prlimit64": limited.answer()}
    thread: FilteredThread[Result] = FilteredThread(lambda: sandbox.run_with_handlers(command, list(answers.items())))
    try:
        found = thread.result()
    except (SandlockError, RuntimeError, OSError) as error:
        raise _not_started(error) from error
    except BaseException:  # this thread was interrupted, and the other one runs the command
        leader.kill()
        raise
    finally:
        thread.end()
        leader.ended()
        timer.cancel()
        disk.end()
        pipes.end()
        stdout, stderr = attended.finish()
    if found.reason is None:
        raise SandboxFault(f"sandlock lost a command: {found.error}")
    if attended.overflowed:
        return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_OUTPUT, None)
    if timed_out.is_set():
        return CommandOutput(stdout, stderr, CommandEnd.TIMED_OUT, None)
    if disk.exceeded:
        return CommandOutput(stdout, stderr, CommandEnd.TOO_MUCH_DISK, None)
    if found.reason is ExitReason.EXITED:
        return CommandOutput(stdout, stderr, CommandEnd.EXITED, found.exit_code)
    log.info("a command was ended by %s", _signal_of(found))
    return CommandOutput(stdout, stderr, CommandEnd.KILLED, None)


def _signal_of(found: Result) -> str:
    """Returns the name of the signal that ended a command. sandlock gives no number for SIGKILL, which also ends a
    command at its limit of memory."""
    return signal.Signals(found.signal).name if found.reason is ExitReason.SIGNALED else "SIGKILL"
