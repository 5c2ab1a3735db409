"""Watches the folder of a command, and ends the command when the folder exceeds the limits of disk and files.

No kernel limits a folder without root. So a thread looks at the free space of its file system every 0.1 s, which costs
one call. Only if that fell, or after some seconds, it measures the folder. Files that were deleted but are still open
count too.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tentalis.agents.sandbox.wall import MIB, Limits

_POLL_S = 0.1
_SLOW_S = 5.0
"""Seconds until the next measurement if the free space did not fall; more if a measurement takes long."""
_SLOW_SHARE, _FAST_SHARE = 50, 4
"""After a measurement, the next one waits at least so many times as long as that took: the second number if the free
space falls."""
_STEP_MB, _STEP_FILES = 64, 2000
"""A fall of the free space by so much, or by an eighth of the limit, leads to a measurement."""
_END_MB, _END_FILES = 16, 512
"""A fall by so much at the end of a command leads to a last measurement."""
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Use of disk. `whole` is False if a part could not be read, such as a folder without rights."""

    bytes: int
    files: int
    whole: bool


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Free bytes and free inodes of a file system. Some file systems always say 0 inodes."""

    bytes: int
    files: int

    def fell_by(self, since: "FreeSpace", byte_count: int, file_count: int) -> bool:
        """Returns True if it is lower than it was, by a number of bytes or of files."""
        return since.bytes - self.bytes >= byte_count or since.files - self.files >= file_count


class FolderWatch:
    """Watches a folder from now on. Calls `kill` from another thread, once, when the folder is over its limits."""

    def __init__(self, folder: Path, limits: Limits, kill: Callable[[], None]) -> None:
        self.exceeded = False
        self._folder, self._kill = folder, kill
        self._bytes, self._files = limits.disk_mb * MIB, limits.files
        self._step = min(_STEP_MB * MIB, self._bytes // 8), min(_STEP_FILES, self._files // 8)
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._first = self._last = self._free()
        self._next, self._not_before = time.monotonic() + _SLOW_S, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.exceeded and not self._ended.wait(_POLL_S):
            now = time.monotonic()
            if now >= self._next or (now >= self._not_before and self._free().fell_by(self._last, *self._step)):
                self._measure()
                if self.exceeded:
                    self._kill()

    def end(self) -> None:
        """Ends the watch. Measures a last time if the free space fell, so that many commands add up to no more."""
        self._ended.set()
        self._thread.join()
        if not self.exceeded and self._free().fell_by(self._last, _END_MB * MIB, _END_FILES):
            self._measure()
        os.close(self._root)

    def _measure(self) -> None:
        began = time.monotonic()
        self._last = self._free()
        found = used(self._folder)
        # What cannot be read may hold anything: then the fall of the free space counts as the command's.
        fell = not found.whole and self._last.fell_by(self._first, self._bytes, self._files)
        self.exceeded = found.bytes > self._bytes or found.files > self._files or fell
        ended = time.monotonic()
        self._next = ended + max(_SLOW_S, _SLOW_SHARE * (ended - began))
        self._not_before = ended + _FAST_SHARE * (ended - began)

    def _free(self) -> FreeSpace:
        found = os.statvfs(self._root)
        return FreeSpace(found.f_bfree * found.f_frsize, found.f_ffree)


def used(folder: Path) -> DiskUse:
    """Returns the disk use of a folder. Hard links count once."""
    (size, size_whole), (files, files_whole) = _du(folder, "--block-size=1"), _du(folder, "--inodes")
    return DiskUse(size + _deleted_bytes(folder), files, size_whole and files_whole)


def _du(folder: Path, unit: str) -> tuple[int, bool]:
    """Returns a sum over a folder, and True if all of it could be read. The program copes with folders that are nested
    deeper than a path is long."""
    done = subprocess.run(["du", "--summarize", unit, "--", folder], capture_output=True, check=False)
    number = done.stdout.partition(b"\t")[0]
    return int(number) if number.isdigit() else 0, done.returncode == 0


def _deleted_bytes(folder: Path) -> int:
    """Returns the size of the files in a folder that were deleted and that processes of this user still hold open."""
    found: dict[tuple[int, int], int] = {}
    inside = f"{folder.resolve()}/"
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            opened = list(descriptors.iterdir())
        except OSError:  # the process has ended, or belongs to somebody else
            continue
        for each in opened:
            try:
                path = str(each.readlink())
                if path.startswith(inside) and path.endswith(_DELETED):
                    status = each.stat()
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
            except OSError:  # it was closed
                continue
    return sum(found.values())
