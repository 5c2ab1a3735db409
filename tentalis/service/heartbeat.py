"""Heartbeat files, which the working loop of a process touches to show its supervisor that it works.

TENTALIS_HEARTBEAT names a folder; each rank of the process has one file in it. The supervisor watches for changes of
the modification time; the content is the reason why the process is not ready (empty: it is ready). No clocks are
compared, and a full disk does not stop the heartbeat: touching a file takes no space.

`health.LoopWatch` watches the same loops; both are needed, because their readers differ. A probe of compose or
helm asks a port, has no memory and does not see the inner processes: it needs a verdict, by the process's own limit,
from a thread that keeps serving while the loop is stuck. The local supervisor must see every rank of a trainer, of
which at most one has a port, and processes without a port; it knows when the machine was asleep and how long a start
may take, so it needs only the raw heartbeat and judges by itself.
"""

import errno
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tentalis.service import variables

VARIABLE = variables.HEARTBEAT.name
INTERVAL_S = 1.0


class Heart:
    """The writing end. Without TENTALIS_HEARTBEAT it does nothing: compose and helm have their own probes."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        folder = variables.HEARTBEAT.read(env)
        self._file = folder / env.get("RANK", "0") if folder else None
        self._next = 0.0
        self._written: str | None = None

    def beat(self, trouble: str = "") -> None:
        """Writes a heartbeat; the working loop may call it as often as it likes.

        Raises OSError if the file cannot be created.
        """
        if self._file is None or (time.monotonic() < self._next and trouble == self._written):
            return
        if trouble != self._written:
            try:
                self._file.write_text(trouble, encoding="utf-8")
                self._written = trouble
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._file.exists():
                    raise
                # On a full disk the text is written later, but the beat still happens.
        os.utime(self._file)
        self._next = time.monotonic() + INTERVAL_S


class Beats:
    """The reading end, for the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, int] = {}

    def clear(self) -> None:
        """Empties the folder before the process starts, so that later files are from this start. Raises OSError."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._seen.clear()

    def trouble(self) -> str | None:
        """The reason why the process is not ready, "" if it is ready, None if it has not begun to work."""
        files = sorted(self.folder.glob("*"))
        return "; ".join(filter(None, (file.read_text(encoding="utf-8") for file in files))) if files else None

    def silent(self) -> list[str]:
        """The ranks without a heartbeat since the last call."""
        now = {file.name: file.stat().st_mtime_ns for file in sorted(self.folder.glob("*"))}
        silent = [rank for rank, moved in now.items() if self._seen.get(rank) == moved]
        self._seen = now
        return silent
