"""A queue on disk: lines are appended with fsync, read from the front, and removed after the reader releases them.

`NNNNNNNNNN.lines` hold the lines, each `CRC32 in hex, blank, text`; `front` holds the position up to which they are
released. The process may be killed, or the disk may fill up, at any byte: a line whose `append` returned is on disk;
any other line is complete or absent.
"""

import contextlib
import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SEGMENT_BYTES = 4 * 2**20
FRONT, LOCK, SUFFIX = "front", "lock", ".lines"


class SpoolError(Exception):
    """An operation of the spool failed. The message says why, and what to do."""


class SpoolBusy(SpoolError):
    """Another process uses the folder."""


class TraceSpoolFull(SpoolError):
    """The size limit is reached, or the disk is full. The line was not written."""


class SpoolDamaged(SpoolError):
    """The folder's content is not valid for a spool."""


@dataclass(frozen=True, slots=True, order=True)
class SpoolPosition:
    """A position before a line or after the last one: segment and byte."""

    segment: int = 0
    byte: int = 0


def line_of(text: str) -> bytes:
    """Encodes a text without line ends as a line on disk."""
    data = text.encode()
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def text_of(line: bytes) -> str | None:
    """Decodes a line, its end included; None if it is damaged."""
    if len(line) < 10 or line[8:9] != b" " or line[-1:] != b"\n":
        return None
    data = line[9:-1]
    return data.decode() if line[:8] == b"%08x" % zlib.crc32(data) else None


class TraceSpool:
    """The queue of one process; its methods may be called on any thread.

    Args:
        folder: created if missing, accessible only to its owner.
        max_bytes: limit on disk, including released lines that are not yet removed.
    Raises:
        SpoolBusy, SpoolDamaged, OSError.
    """

    def __init__(self, folder: Path, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self._max_bytes, self._segment_bytes = (
            folder,
            max_bytes,
            min(segment_bytes, max(1, max_bytes // 4)),
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise SpoolBusy(
                f"{folder} is the spool of another process: each program needs a folder that no other uses"
            ) from error
        self._mutex = threading.RLock()
        self._closed = False
        try:
            self._damaged: set[SpoolPosition] = set()
            self._front = self._read_front()
            self._sizes = {number: self._path(number).stat().st_size for number in self._segments()}
            for number in [number for number in self._sizes if number < self._front.segment]:
                self._remove(number)
            self._last = max(self._sizes, default=self._front.segment)
            self._file = self._open(self._last)
            self._cut_partial_line()
            self._waiting = sum(1 for _ in self._lines(self._front))
        except BaseException:
            os.close(self._lock)
            raise

    def __len__(self) -> int:
        return self._waiting

    @property
    def damaged(self) -> int:
        """Number of damaged lines; they are skipped."""
        return len(self._damaged)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    def append(self, text: str) -> None:
        """Appends a text. Returns once it is safe on disk. Raises TraceSpoolFull, SpoolError."""
        line = line_of(text)
        if b"\n" in line[:-1]:
            raise SpoolError("a line of the spool cannot contain a line end")
        with self._mutex:
            if self._closed:
                raise SpoolError("the spool is closed")
            if self.size + len(line) > self._max_bytes:
                raise TraceSpoolFull(
                    f"{self.folder} holds {self.size:,} bytes of {self._max_bytes:,}: bring the gateway back, so that "
                    "the spool drains, or raise the limit (spool_bytes)"
                )
            try:
                if self._sizes[self._last] >= self._segment_bytes:
                    self._roll()
                self._write(line)
            except OSError as error:
                raise TraceSpoolFull(
                    f"{self.folder} cannot be written ({error.strerror}): nothing was recorded"
                ) from error
            self._waiting += 1

    def peek(self, max_items: int, max_bytes: int) -> tuple[list[str], SpoolPosition]:
        """Returns the first unreleased texts, at most `max_items` of them and `max_bytes` (but always one), and the
        place after them, for `release`."""
        with self._mutex:
            texts: list[str] = []
            size, end = 0, self._front
            for text, place in self._lines(self._front):
                size += len(text)
                if len(texts) == max_items or (texts and size > max_bytes):
                    break
                texts.append(text)
                end = place
            return texts, end

    def release(self, end: SpoolPosition, count: int) -> None:
        """Releases `count` texts, all those before a place. Raises OSError, SpoolError: they are then read again."""
        with self._mutex:
            if self._closed:
                raise SpoolError("the spool is closed")
            self._write_front(end)
            self._front, self._waiting = end, self._waiting - count
            if self._waiting == 0 and self._sizes[self._last] >= self._segment_bytes // 2:
                self._roll()
                self._write_front(SpoolPosition(self._last, 0))
                self._front = SpoolPosition(self._last, 0)
            for number in [number for number in self._sizes if number < self._front.segment]:
                self._remove(number)

    def close(self) -> None:
        """Closes the files and unlocks the folder."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                os.close(self._lock)

    # On disk

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:010d}{SUFFIX}"

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}") if path.stem.isdigit())

    def _open(self, number: int) -> int:
        handle = os.open(self._path(number), os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        self._sizes[number] = os.fstat(handle).st_size
        self._sync_folder()
        return handle

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _write(self, line: bytes) -> None:
        size_before = self._sizes[self._last]
        try:
            if os.fstat(self._file).st_size != size_before:
                os.ftruncate(self._file, size_before)  # a failed write could not be undone earlier
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            os.fsync(self._file)
        except OSError:
            # A partial line must not precede the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size_before)
            raise
        self._sizes[self._last] = size_before + len(line)

    def _roll(self) -> None:
        new_file = self._open(self._last + 1)
        os.close(self._file)
        self._file, self._last = new_file, self._last + 1

    def _remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        del self._sizes[number]

    def _cut_partial_line(self) -> None:
        """Cuts off a line that a kill left unfinished: its `append` never returned."""
        data = self._path(self._last).read_bytes()
        complete_bytes = data.rfind(b"\n") + 1
        if complete_bytes < len(data):
            os.ftruncate(self._file, complete_bytes)
            os.fsync(self._file)
            self._sizes[self._last] = complete_bytes
        if self._front.segment == self._last and self._front.byte > complete_bytes:
            raise SpoolDamaged(
                f"{self.folder / FRONT} points past the end of {self._path(self._last).name}: remove "
                f"{self.folder / FRONT}, and everything on disk is sent again"
            )

    def _lines(self, start: SpoolPosition) -> Iterator[tuple[str, SpoolPosition]]:
        """Yields each text with the place after it."""
        for number in sorted(self._sizes):
            if number < start.segment:
                continue
            with self._path(number).open("rb") as file:
                position = start.byte if number == start.segment else 0
                file.seek(position)
                for line in file:
                    position += len(line)
                    text = text_of(line)
                    if text is None:
                        self._report_damaged(number, position)
                        continue
                    yield text, SpoolPosition(number, position)

    def _report_damaged(self, number: int, position: int) -> None:
        if SpoolPosition(number, position) not in self._damaged:
            self._damaged.add(SpoolPosition(number, position))
            log.error("%s: the line that ends at byte %d was damaged on disk", self._path(number), position)

    def _read_front(self) -> SpoolPosition:
        try:
            text = text_of((self.folder / FRONT).read_bytes())
        except FileNotFoundError:
            return SpoolPosition(min(self._segments(), default=0), 0)
        if text is None:
            raise SpoolDamaged(f"{self.folder / FRONT} is damaged: remove it, and everything on disk is sent again")
        segment, byte = text.split()
        return SpoolPosition(int(segment), int(byte))

    def _write_front(self, position: SpoolPosition) -> None:
        new_file = self.folder / f"{FRONT}.new"
        with new_file.open("wb") as file:
            file.write(line_of(f"{position.segment} {position.byte}"))
            file.flush()
            os.fsync(file.fileno())
        new_file.replace(self.folder / FRONT)
        self._sync_folder()
