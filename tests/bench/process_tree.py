"""Runs a command and measures it with all its descendants: wall and CPU seconds, peak memory (Linux)."""

import ctypes
import os
import resource
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Reading the memory of a process walks its page tables, which takes CPU time from the command.
EVERY_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """`cpu_s`: user and system time of all processes. `peak_mb`: most memory of all of them at a time, sampled every
    EVERY_S seconds; a page that several share is counted once (PSS)."""

    began: float
    wall_s: float
    cpu_s: float
    peak_mb: float


def run_measured(command: Sequence[str], env: Mapping[str, str], cwd: Path, output: IO[Any]) -> TreeUsage:
    """Runs a command to its end and to that of its descendants. `output` gets stdout and stderr.

    Descendants whose parents end become children of this process, which waits for them: their CPU time is counted too.
    Nothing else may run beside it that starts processes. Raises CalledProcessError.
    """
    _become_subreaper()
    before = _children_cpu()
    began, clock = time.time(), time.monotonic()
    child = subprocess.Popen(command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    peak, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(EVERY_S):
            peak = max(peak, sum(map(pss_mb, descendants(os.getpid()))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = child.wait()
        wall = time.monotonic() - clock
        _reap()
    finally:
        ended.set()
        watcher.join()
    if code != 0:
        raise subprocess.CalledProcessError(code, command)
    return TreeUsage(began, wall, _children_cpu() - before, peak)


def descendants(pid: int) -> list[int]:
    """Returns the processes below a process."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # has ended
            children[int(fields[1])].append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children[parent]]
        found += new
    return found


def pss_mb(pid: int) -> float:
    """Returns the proportional memory of a process in MB; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), None)
    return 0.0 if line is None else int(line.split()[1]) * 1024 / 1e6


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _reap() -> None:
    """Waits for the descendants that the command left."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
