"""Reads the logs of the processes as one: parsed, filtered by time and level, merged, followed while they grow.

A log has the lines of `tentalis.service.logs`, of the broker's Log4j, and others: tracebacks, prints, the last `error:`
of a command. A line without its own time and level belongs to the line before it; a traceback is an error.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_HEAD = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3}) ([A-Z]+) ")
_START = re.compile(r"--- (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) ")
_LEVELS = {"TRACE": logging.DEBUG, "WARN": logging.WARNING, "FATAL": logging.CRITICAL}
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a process's log.

    Attributes:
        at: ms since the epoch; that of the line before if it has none.
        level: its level as a number of `logging`.
        process: the name of the process.
        text: the line.
    """

    at: int
    level: int
    process: str
    text: str


class LogParser:
    """Parses the lines of one log in order. Pure."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._at, self._level = 0, logging.INFO

    def parse(self, text: str) -> LogLine:
        """Returns the line with its time and level."""
        if head := _HEAD.match(text):
            self._at = _local_ms(f"{head[1]} {head[2]}.{head[3]}")
            self._level = _LEVELS.get(head[4]) or logging.getLevelNamesMapping().get(head[4], logging.INFO)
        elif start := _START.match(text):
            self._at, self._level = _local_ms(f"{start[1]} {start[2]}"), logging.INFO
        elif text.startswith("error: "):
            self._level = logging.ERROR
        elif text.startswith("Traceback "):
            self._level = max(self._level, logging.ERROR)
        return LogLine(self._at, self._level, self._process, text)


def _local_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


class LogFile:
    """One process's log, read from its beginning (the part that was turned over included) and then followed."""

    def __init__(self, process: str, file: Path) -> None:
        self._file = file
        self._earlier = file.with_name(f"{file.name}.1")
        self._turned = _identity(self._earlier)
        self._parser = LogParser(process)
        self._offset = 0
        self._rest = b""

    def skip_past(self) -> None:
        """Leaves out the lines there are now."""
        try:
            self._offset = self._file.stat().st_size
        except FileNotFoundError:
            self._offset = 0

    def past(self) -> Iterator[LogLine]:
        """Yields the lines there are now, oldest first."""
        if self._turned is not None:
            with self._earlier.open("rb") as file:
                for line in file:
                    yield self._parser.parse(_text(line))
        yield from self.new()

    def new(self) -> Iterator[LogLine]:
        """Yields the complete lines that came since the last call."""
        try:
            size = self._file.stat().st_size
        except FileNotFoundError:
            return
        turned = _identity(self._earlier)
        # The copy is made before the file is cut off.
        if turned is not None and turned != self._turned and size < self._earlier.stat().st_size:
            yield from self._lines_of(self._earlier)
            self._turned, self._offset, self._rest = turned, 0, b""
        elif size < self._offset:  # cut off without a copy
            self._offset, self._rest = 0, b""
        yield from self._lines_of(self._file)

    def _lines_of(self, path: Path) -> Iterator[LogLine]:
        with path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK):
                self._offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    yield self._parser.parse(_text(line))


def _identity(file: Path) -> tuple[int, int] | None:
    """Number and time of a file, which tell it from another one in its place; None if there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")


def merged(files: Sequence[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Merges the lines of several logs by time; lines of one log keep their order."""
    return heapq.merge(*files, key=lambda line: line.at)


def wanted(since: int, level: int) -> Callable[[LogLine], bool]:
    """Returns the filter for lines from `since` (ms since the epoch) on, at `level` or above."""
    return lambda line: line.at >= since and line.level >= level
