"""Free disk space of the installation, and messages about a shortage."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
# With less free space, a process may fail to write its next record: an exit now is attributed to the full disk.
FULL = 32 * MIB
# A stack started with less runs out of space before its first training step.
LEAST = 256 * MIB
NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes available to this user and in total, and free inodes (None if the file system does not count them)."""

    folder: Path
    free: int
    total: int
    inodes: int | None

    def __str__(self) -> str:
        return f"(free {_size(self.free)} of {_size(self.total)})"

    def shortage(self, needed: int) -> str | None:
        """Returns a message if fewer than `needed` bytes or no inodes are free, else None."""
        if self.inodes == 0:
            return f"no space left on {self.folder}: no inode is free {self}"
        if self.free < needed:
            return f"no space left on {self.folder} {self}"
        return None


def nearest_existing(folder: Path) -> Path:
    """Returns `folder`, or its nearest ancestor that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def space(folder: Path) -> Space:
    """Returns the space of `folder`, or of its nearest existing ancestor. Raises OSError."""
    found = os.statvfs(nearest_existing(folder))
    return Space(
        folder,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else None,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
