"""Whether there is room where the installation writes, in words for a person."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
# Less than this, and some process cannot write its next record: what ends now ends because of that.
FULL = 32 * MIB
# A stack that begins with less comes to that before its first step is trained.
LEAST = 256 * MIB
NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes free to us and in all, and free inodes (None where the file system does not count them)."""

    folder: Path
    free: int
    total: int
    inodes: int | None

    def __str__(self) -> str:
        return f"(free {_size(self.free)} of {_size(self.total)})"

    def shortage(self, needed: int) -> str | None:
        """What is missing for `needed` bytes, or None."""
        if self.inodes == 0:
            return f"no space left on {self.folder}: no inode is free {self}"
        if self.free < needed:
            return f"no space left on {self.folder} {self}"
        return None


def space(folder: Path) -> Space:
    """The room where `folder` is, or will be: at its nearest ancestor that exists. Raises OSError."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    found = os.statvfs(there)
    return Space(
        folder,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else None,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
