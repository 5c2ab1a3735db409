"""The first process behind bubblewrap: starts the command, counts its memory, reports its end. A program by itself.

Its argument is a JSON object (see `bubblewrap_wall`). It ends when the command has ended, when its processes have too
much memory, or when the worker closes the pipe `lifeline` or is gone. The kernel then kills everything that the command
started, because this is process 1 of its namespace. The command cannot change this process: it is not dumpable, and
ignores the signals of its namespace.

It uses the standard library alone, because it runs where the packages of the worker cannot be read.
"""

import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN, EXITED, SIGNALLED = b"began", b"exited", b"signalled"
"""Words of the report: written before the command, and with a number after it."""
_POLL_MS = 50
_KIB = 1024
_PR_SET_SECCOMP, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 4, 38, 2
_COUNTED = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap|VmPTE):\s*(\d+) kB", re.MULTILINE)
_SHARE = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s*(\d+) kB", re.MULTILINE)
_PAGE_TABLES = re.compile(rb"^VmPTE:\s*(\d+) kB", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog`: number and address of the instructions."""

    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]


def main() -> None:
    """Runs the command of the first argument."""
    spec = json.loads(sys.argv[1])
    _control(_PR_SET_DUMPABLE, 0, 0)
    lifeline, report = int(spec["lifeline"]), int(spec["report"])
    for descriptor in (lifeline, report):
        os.set_inheritable(descriptor, False)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.write(report, BEGAN + b"\n")
    child = os.fork()
    if child == 0:
        _become(spec)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    status = _attend(child, lifeline, ended, int(spec["memory_bytes"]))
    if status is not None:
        word = SIGNALLED if os.WIFSIGNALED(status) else EXITED
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        os.write(report, b"%s %d\n" % (word, number))
    os._exit(0)


def _attend(child: int, lifeline: int, ended: int, memory_bytes: int) -> int | None:
    """Returns the status with which a process ended; that of SIGKILL if its processes had too much memory, and None if
    the worker ended it. Reaps what lost its parent."""
    poller = select.poll()
    for descriptor in (lifeline, ended):
        poller.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll(_POLL_MS):
            if descriptor == lifeline:
                return None
            os.read(ended, 4096)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                break
        if memory_used(_status) > memory_bytes and memory_used(_proportional) > memory_bytes:
            return int(signal.SIGKILL)


def memory_used(of: Callable[[str], int]) -> int:
    """Returns the memory of all processes but this one, in bytes. `of`: KiB of a process by its id."""
    ids = (path.name for path in Path("/proc").iterdir())
    return sum(of(name) for name in ids if name.isdigit() and name != "1") * _KIB


def _status(pid: str) -> int:
    """Returns the KiB of a process and of its page tables. Pages that processes share count in each."""
    return sum(map(int, _COUNTED.findall(_read(f"/proc/{pid}/status"))))


def _proportional(pid: str) -> int:
    """Like `_status`, with the process's share of shared pages. It takes longer."""
    shares = _SHARE.findall(_read(f"/proc/{pid}/smaps_rollup"))
    if not shares:  # the process is not readable, or has ended
        return _status(pid)
    return sum(map(int, [*shares, *_PAGE_TABLES.findall(_read(f"/proc/{pid}/status"))]))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has ended
        return b""


def _become(spec: dict[str, Any]) -> None:
    """Becomes the command, under its limits and the filter of system calls. Never returns."""
    command = [str(word) for word in spec["command"]]
    try:
        if spec["stdin"] is not None:
            os.dup2(os.open(spec["stdin"], os.O_RDONLY), 0)
        for name, limit in spec["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        confine(bytes.fromhex(spec["filter"]))
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def confine(program: bytes) -> None:
    """Puts this thread, and all that it starts from now on, under a filter of system calls. Raises OSError."""
    _control(_PR_SET_NO_NEW_PRIVS, 1, 0)
    code = ctypes.create_string_buffer(program, len(program))
    made = FilterProgram(len(program) // 8, ctypes.addressof(code))
    _control(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(made))


def _control(option: int, first: int, second: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
