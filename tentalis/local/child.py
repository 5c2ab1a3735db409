"""Helper processes of the supervisor. Uses only the standard library and runs as a file.

`child.py exec PARENT ARGV...` ties its life to its parent's and then becomes ARGV (same process id).
`child.py keep MARK` waits until its standard input closes, which happens when the supervisor dies. It then kills every
process with MARK in its environment, including descendants that left the process group, such as a launcher's ranks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "TENTALIS_SUPERVISED"
_PR_SET_PDEATHSIG = 1


def command() -> list[str]:
    """Returns the command that runs this file: isolated and without site packages, which saves start time."""
    return [sys.executable, "-I", "-S", __file__]


def marked(prefix: str) -> list[int]:
    """Returns the ids of other processes whose environment has `TENTALIS_SUPERVISED=<prefix>...`."""
    return [pid for pid, _ in _found(prefix)]


def marks(prefix: str) -> set[str]:
    """Returns the marks of other processes that begin with `prefix`."""
    return {mark for _, mark in _found(prefix)}


def _found(prefix: str) -> Iterator[tuple[int, str]]:
    name = f"{MARK}=".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - called often, and names are all it needs
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:  # it ended, or belongs to another user
                continue
            for variable in environment.split(b"\0"):
                if variable.startswith(name + prefix.encode()):
                    yield int(entry), variable.removeprefix(name).decode(errors="replace")
                    break


def kill_marked(prefix: str, timeout: float = 2.0) -> list[int]:
    """Kills every process marked with `prefix`, including new forks, with SIGKILL. Returns the ids once they are gone.

    Raises:
        TimeoutError: some still exist after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    killed: list[int] = []
    while pids := marked(prefix) or (killed and _marked_a_moment_later(prefix)):
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                # The id may have been reused before the handle was opened: check the mark again.
                if f"{MARK}={prefix}".encode() in Path("/proc", str(pid), "environ").read_bytes():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed.append(pid)
                    select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            except (ProcessLookupError, FileNotFoundError):
                continue
            finally:
                os.close(handle)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} still exist {timeout:g} s after SIGKILL")
    return killed


def _marked_a_moment_later(prefix: str) -> list[int]:
    """Looks again after a moment: during exec, a process shows no environment."""
    time.sleep(0.01)
    return marked(prefix)


def _become(parent: int, command: list[str]) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the prctl call
        sys.exit(1)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error}")


def _keep(prefix: str) -> None:
    while os.read(0, 4096):
        pass
    kill_marked(prefix, timeout=10.0)


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        _become(int(sys.argv[2]), sys.argv[3:])
    else:
        _keep(sys.argv[2])
