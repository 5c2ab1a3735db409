"""The history of the local stack: changes of state, exits and operators' requests, in `events.jsonl`, bounded on disk.

The supervisor appends; `tentalis events` reads. A full file becomes `events.jsonl.1` and replaces the one before it. On
a full disk, events wait in memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

FILE = "events.jsonl"
LIMIT = 2**20
_PENDING = 1000


@dataclass(frozen=True, slots=True)
class StackEvent:
    """One entry of the history.

    Attributes:
        at: ms since the epoch.
        process: the name of a process, or `stack`.
        event: the state that it entered, `exited`, or the operator's request.
        detail: the message of the state, the exit and the last error, or the request.
        restarts: number of restarts so far.
        pid: process id, if it runs.
    """

    at: int
    process: str
    event: str
    detail: str = ""
    restarts: int = 0
    pid: int | None = None


class StackHistory:
    """The writing end, for the supervisor. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._pending: deque[StackEvent] = deque(maxlen=_PENDING)
        self._failing = False

    def add(self, process: str, event: str, detail: str = "", *, restarts: int = 0, pid: int | None = None) -> None:
        """Appends an event. If it cannot be written now, `flush` tries again."""
        self._pending.append(StackEvent(now_ms(), process, event, detail, restarts, pid))
        self.flush()

    def flush(self) -> None:
        """Writes the events that could not be written before. Call it from time to time."""
        if not self._pending:
            return
        text = "".join(json.dumps(asdict(event), ensure_ascii=False) + "\n" for event in self._pending)
        try:
            if self._file.exists() and self._file.stat().st_size > LIMIT:
                self._file.replace(older(self._file))
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if not self._failing:
                log.warning("cannot write the history to %s: %s", self._file, error)
            self._failing = True
            return
        self._failing = False
        self._pending.clear()


def older(file: Path) -> Path:
    """Returns the file that holds what a full file held."""
    return file.with_name(f"{file.name}.1")


def read_events(folder: Path, since: int = 0) -> Iterator[StackEvent]:
    """Yields the events of a state directory from `since` (ms since the epoch) on, oldest first.

    A line that a full disk has cut is left out.
    """
    for file in (older(folder / FILE), folder / FILE):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            event = _parsed(line)
            if event is not None and event.at >= since:
                yield event


def _parsed(line: str) -> StackEvent | None:
    try:
        found: dict[str, Any] = json.loads(line)
        return StackEvent(**found)
    except (json.JSONDecodeError, TypeError):
        return None


def local_time(ms: int) -> str:
    """Formats ms since the epoch in local time, as the logs have it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000))
