"""How a process without a port of its own tells its supervisor that it works: files that the working loop touches.

TENTALIS_HEARTBEAT names a folder; each rank of the process has one file in it. That its modification time moves is the
sign of life; its content is what keeps the process from being ready, in words for a person (empty: nothing does).
No clock is compared, and a disk that is full does not stop a heart: touching a file takes no space.

`tentalis.health.Turns` says of the same loops whether they stand still, and both are needed, as those who ask differ. A
probe of compose or helm asks a port, remembers nothing, and does not see the processes inside: it has to be told a
verdict, by a limit of the process's own, and what serves the port is a thread that a loop standing still does not stop.
The local supervisor has to see every rank of a trainer, of which one at most has a port, and processes that were given
none; it knows when the machine was asleep and how long a start may take, so it wants the bare sign and judges itself.
"""

import errno
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TENTALIS_HEARTBEAT"
INTERVAL_S = 1.0


class Heart:
    """The writing end. Without TENTALIS_HEARTBEAT it does nothing: compose and helm have probes of their own."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        folder = env.get(VARIABLE)
        self._file = Path(folder, env.get("RANK", "0")) if folder else None
        self._next = 0.0
        self._written: str | None = None

    def beat(self, trouble: str = "") -> None:
        """To be called by the loop that does the work, as often as it likes.

        Raises OSError, if the file cannot be made.
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
                # On a full disk the words have to wait, the beat does not.
        os.utime(self._file)
        self._next = time.monotonic() + INTERVAL_S


class Beats:
    """The supervisor's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, int] = {}

    def clear(self) -> None:
        """Before the process is started: what is found later is its own. Raises OSError."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._seen.clear()

    def trouble(self) -> str | None:
        """What keeps the process from being ready, "" if nothing does, None if it has not begun to work."""
        files = sorted(self.folder.glob("*"))
        return "; ".join(filter(None, (file.read_text(encoding="utf-8") for file in files))) if files else None

    def silent(self) -> list[str]:
        """The ranks that have not beaten since the last call."""
        now = {file.name: file.stat().st_mtime_ns for file in sorted(self.folder.glob("*"))}
        silent = [rank for rank, moved in now.items() if self._seen.get(rank) == moved]
        self._seen = now
        return silent
