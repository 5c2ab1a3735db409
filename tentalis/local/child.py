"""What runs between the supervisor and the processes it supervises. Standard library only, and run as a file.

`child.py exec PARENT ARGV...` ties its own life to its parent's and then becomes ARGV (same process id).
`child.py keep MARK` waits until its standard input closes, which the supervisor's death does, and then kills every
process that carries MARK in its environment: also descendants that left the process group, as a launcher's ranks do.
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
    """How to run this file: isolated and without site packages, which takes a few hundredths of a second."""
    return [sys.executable, "-I", "-S", __file__]


def marked(prefix: str) -> list[int]:
    """Process ids, our own left out, whose environment has `TENTALIS_SUPERVISED=<prefix>...`."""
    return [pid for pid, _ in _found(prefix)]


def marks(prefix: str) -> set[str]:
    """The marks that begin with `prefix` and that processes other than our own carry."""
    return {mark for _, mark in _found(prefix)}


def _found(prefix: str) -> Iterator[tuple[int, str]]:
    name = f"{MARK}=".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - called often, and names are all it needs
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:  # it ended, or belongs to somebody else
                continue
            for variable in environment.split(b"\0"):
                if variable.startswith(name + prefix.encode()):
                    yield int(entry), variable.removeprefix(name).decode(errors="replace")
                    break


def kill_marked(prefix: str, timeout: float = 2.0) -> list[int]:
    """SIGKILL every process marked with `prefix`, those they fork meanwhile too; return the ids once they are gone.

    Raises:
        TimeoutError: some are still there after `timeout` seconds.
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
                # The handle is for whoever has the id now: look again before killing it.
                if f"{MARK}={prefix}".encode() in Path("/proc", str(pid), "environ").read_bytes():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed.append(pid)
                    select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            except (ProcessLookupError, FileNotFoundError):
                continue
            finally:
                os.close(handle)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} are still there {timeout:g} s after SIGKILL")
    return killed


def _marked_a_moment_later(prefix: str) -> list[int]:
    """Look again: while a process executes another program, it has no environment to be seen."""
    time.sleep(0.01)
    return marked(prefix)


def _become(parent: int, command: list[str]) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the line above
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
