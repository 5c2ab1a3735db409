"""The mark of a process on the commands that it runs, so that a later process ends those that a killed one left.

A command may have started processes in separate sessions, which live on if the process that holds its wall is
killed. So each command begins with a mark: its hard limit of file locks, which Linux does not enforce. Processes
inherit it, and without privileges it can never be raised or removed; a wall answers the calls that would lower it
(`attributes.OwnLimits`). The mark names its holder by process id and a random number, and has a checksum, so that a
limit that somebody else set is not taken for one. The holder has the mark as its soft limit alone, and an unlimited
hard limit, so that no command can pose as a holder, and so that its other children are no commands.
"""

import logging
import os
import re
import secrets
import threading
import zlib
from functools import cache
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

LEAST = 1 << 61
"""The bit above those of a mark: no system sets such a limit by itself. Below: random number, checksum, process id."""
_PID_BITS, _CHECK_BITS, _RANDOM_BITS = 22, 16, 23
_UNLIMITED = -1
_ROUNDS = 100
_marking = threading.Lock()
_NESTED = re.compile(r"^NSpid:\s*\d+\s+\d+", re.MULTILINE)


def mark() -> int | None:
    """Returns the mark of this process, which lasts until it ends, however it ends. None: this system has no marks.

    May be called from several threads: a command with another mark than its holder would be killed as left behind.
    """
    with _marking:
        return _mark_of_this_process()


@cache
def _mark_of_this_process() -> int | None:
    if not hasattr(psutil, "RLIMIT_LOCKS"):
        return None
    this = psutil.Process()
    if this.rlimit(psutil.RLIMIT_LOCKS)[1] != _UNLIMITED:
        log.warning("this process has a limit of file locks: processes that its commands leave are not found later")
        return None
    number = _mark(secrets.randbits(_RANDOM_BITS), this.pid)
    this.rlimit(psutil.RLIMIT_LOCKS, (number, _UNLIMITED))
    return number


def kill_abandoned() -> list[int]:
    """Kills the marked processes of this user whose holder is gone, until there are none. Returns their ids."""
    if not hasattr(psutil, "RLIMIT_LOCKS"):
        return []
    found: list[int] = []
    for _ in range(_ROUNDS):
        left = [process for process in psutil.process_iter() if _is_abandoned(process)]
        if not left:
            return found
        for process in left:
            log.info("a process was left by a worker that is gone, and is killed: %d", process.pid)
            _kill(process)
        psutil.wait_procs(left, timeout=1.0)
        found += [process.pid for process in left if process.pid not in found]
    log.error("processes that a worker left could not be ended: %s", found)
    return found


def _is_abandoned(process: psutil.Process) -> bool:
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        limit = process.rlimit(psutil.RLIMIT_LOCKS)[1]
        if not _is_mark(limit):
            return False
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        if _NESTED.search(status):  # of another container, whose process ids are others
            return False
        return not _holds(limit)
    except (psutil.Error, OSError):  # it has ended, or belongs to somebody else
        return False


def _mark(random: int, pid: int) -> int:
    checksum = zlib.crc32(f"{random} {pid}".encode()) & (1 << _CHECK_BITS) - 1
    return LEAST | random << _CHECK_BITS + _PID_BITS | checksum << _PID_BITS | pid


def _is_mark(limit: int) -> bool:
    """Returns True if a process set this limit as a mark."""
    random = limit >> _CHECK_BITS + _PID_BITS & (1 << _RANDOM_BITS) - 1
    return limit == _mark(random, limit & (1 << _PID_BITS) - 1)


def _holds(number: int) -> bool:
    """Returns True if the holder of a mark lives."""
    try:
        holder = psutil.Process(number & (1 << _PID_BITS) - 1)
        return bool(holder.rlimit(psutil.RLIMIT_LOCKS) == (number, _UNLIMITED))
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
    except psutil.Error as error:
        log.warning("process %d was not killed: %s", process.pid, error)
