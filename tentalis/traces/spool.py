"""A queue on disk: appended and fsync'ed line by line, read from the front, let go when its reader says so.

`NNNNNNNNNN.lines` hold the lines, each `CRC32 in hex, blank, text`; `front` says up to where they were let go. A
process may be killed, or the disk be full, at any byte: what `append` returned from is there, and what it did not
return from is there as a whole or not at all.
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
    """The spool cannot do what it was asked. The message says why, and what to do."""


class SpoolBusy(SpoolError):
    """Another process has the folder."""


class SpoolFull(SpoolError):
    """No room: the bound is reached, or the disk is full. What was to be written is not."""


class SpoolDamaged(SpoolError):
    """The folder holds what no spool has written."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Before a line, or after the last: segment and byte."""

    segment: int = 0
    byte: int = 0


def line_of(text: str) -> bytes:
    """A text without line ends, as it lies on disk."""
    data = text.encode()
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def text_of(line: bytes) -> str | None:
    """The text of a line with its end, None if it is not as it was written."""
    if len(line) < 10 or line[8:9] != b" " or line[-1:] != b"\n":
        return None
    data = line[9:-1]
    return data.decode() if line[:8] == b"%08x" % zlib.crc32(data) else None


class Spool:
    """The queue of one process; its methods may be called on any thread.

    Args:
        folder: made if it is not there, for its owner alone.
        most_bytes: on disk, what was let go but not yet removed included.
    Raises:
        SpoolBusy, SpoolDamaged, OSError.
    """

    def __init__(self, folder: Path, most_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self._most, self._segment_bytes = folder, most_bytes, min(segment_bytes, max(1, most_bytes // 4))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise SpoolBusy(
                f"{folder} is the spool of another process: give each program a folder of its own"
            ) from error
        self._mutex = threading.RLock()
        self._closed = False
        try:
            self._damaged: set[Place] = set()
            self._front = self._read_front()
            self._sizes = {number: self._path(number).stat().st_size for number in self._segments()}
            for number in [number for number in self._sizes if number < self._front.segment]:
                self._remove(number)
            self._last = max(self._sizes, default=self._front.segment)
            self._file = self._open(self._last)
            self._whole()
            self._waiting = sum(1 for _ in self._lines(self._front))
        except BaseException:
            os.close(self._lock)
            raise

    def __len__(self) -> int:
        return self._waiting

    @property
    def damaged(self) -> int:
        """Lines that are not as they were written; they are passed over."""
        return len(self._damaged)

    @property
    def size(self) -> int:
        """On disk."""
        return sum(self._sizes.values())

    def append(self, text: str) -> None:
        """Returns when the text is safe on disk. Raises SpoolFull, SpoolError."""
        line = line_of(text)
        if b"\n" in line[:-1]:
            raise SpoolError("a line of the spool cannot hold a line end")
        with self._mutex:
            if self._closed:
                raise SpoolError("the spool is closed")
            if self.size + len(line) > self._most:
                raise SpoolFull(
                    f"{self.folder} holds {self.size:,} bytes of {self._most:,}: bring the gateway back, so that it "
                    "empties, or allow more (spool_bytes)"
                )
            try:
                if self._sizes[self._last] >= self._segment_bytes:
                    self._roll()
                self._write(line)
            except OSError as error:
                raise SpoolFull(f"{self.folder} cannot be written ({error.strerror}): this was not recorded") from error
            self._waiting += 1

    def peek(self, most: int, most_bytes: int) -> tuple[list[str], Place]:
        """The first texts that were not let go: up to so many, and so many bytes unless the first has more; and the
        place behind them, for `release`."""
        with self._mutex:
            texts: list[str] = []
            size, behind = 0, self._front
            for text, place in self._lines(self._front):
                size += len(text)
                if len(texts) == most or (texts and size > most_bytes):
                    break
                texts.append(text)
                behind = place
            return texts, behind

    def release(self, behind: Place, count: int) -> None:
        """Lets go of `count` texts, all that lies before a place. Raises OSError, SpoolError: then they come again."""
        with self._mutex:
            if self._closed:
                raise SpoolError("the spool is closed")
            self._write_front(behind)
            self._front, self._waiting = behind, self._waiting - count
            if self._waiting == 0 and self._sizes[self._last] >= self._segment_bytes // 2:
                self._roll()
                self._write_front(Place(self._last, 0))
                self._front = Place(self._last, 0)
            for number in [number for number in self._sizes if number < self._front.segment]:
                self._remove(number)

    def close(self) -> None:
        """Gives the folder back."""
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
        begun = self._sizes[self._last]
        try:
            if os.fstat(self._file).st_size != begun:
                os.ftruncate(self._file, begun)  # could not be done when a writing failed
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            # What stands there of the line must not stand before the next.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begun)
            raise
        self._sizes[self._last] = begun + len(line)

    def _roll(self) -> None:
        opened = self._open(self._last + 1)
        os.close(self._file)
        self._file, self._last = opened, self._last + 1

    def _remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        del self._sizes[number]

    def _whole(self) -> None:
        """Cuts off a line that a kill left unfinished: nobody was told that it was written."""
        data = self._path(self._last).read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
            self._sizes[self._last] = whole
        if self._front.segment == self._last and self._front.byte > whole:
            raise SpoolDamaged(f"{self.folder / FRONT} points behind the end of {self._path(self._last).name}")

    def _lines(self, start: Place) -> Iterator[tuple[str, Place]]:
        """Text and the place behind it."""
        for number in sorted(self._sizes):
            if number < start.segment:
                continue
            with self._path(number).open("rb") as file:
                place = start.byte if number == start.segment else 0
                file.seek(place)
                for line in file:
                    place += len(line)
                    text = text_of(line)
                    if text is None:
                        self._passed_over(number, place)
                        continue
                    yield text, Place(number, place)

    def _passed_over(self, number: int, place: int) -> None:
        if Place(number, place) not in self._damaged:
            self._damaged.add(Place(number, place))
            log.error("%s: the line that ends at byte %d was damaged on disk", self._path(number), place)

    def _read_front(self) -> Place:
        try:
            text = text_of((self.folder / FRONT).read_bytes())
        except FileNotFoundError:
            return Place(min(self._segments(), default=0), 0)
        if text is None:
            raise SpoolDamaged(f"{self.folder / FRONT} is damaged: remove it, and everything on disk is sent again")
        segment, byte = text.split()
        return Place(int(segment), int(byte))

    def _write_front(self, place: Place) -> None:
        beside = self.folder / f"{FRONT}.new"
        with beside.open("wb") as file:
            file.write(line_of(f"{place.segment} {place.byte}"))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / FRONT)
        self._sync_folder()
