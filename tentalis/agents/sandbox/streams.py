"""Reads the output of a running command, and kills the command at the output limit or when the caller sets `stop`."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

CHUNK = 64 * 1024
DRAIN_S = 5.0
"""After the end of a command, what is left in its pipes is read for so long."""


class LimitedReader:
    """Reads a binary stream in a thread, at most `limit` bytes. If there is more, calls `overflow`."""

    def __init__(self, stream: IO[bytes], limit: int, overflow: Callable[[], None]) -> None:
        self._stream, self._limit, self._overflow = stream, limit, overflow
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        size = 0
        with self._stream:
            while chunk := self._next():
                kept = chunk[: self._limit - size]
                self._parts.append(kept)
                size += len(kept)
                if len(kept) < len(chunk):
                    self._overflow()
                    return

    def _next(self) -> bytes:
        read1 = getattr(self._stream, "read1", self._stream.read)
        try:
            return bytes(read1(CHUNK))
        except (OSError, ValueError):  # the stream was closed: its command was ended
            return b""

    def finish(self) -> bytes:
        """Returns the bytes read. Waits up to DRAIN_S for the end of the stream."""
        self._thread.join(DRAIN_S)
        return b"".join(self._parts)


class AttendedOutput:
    """The two output streams of a command, each read up to `limit` bytes. `kill` is called, from another thread, at the
    limit and when `stop` is set."""

    def __init__(
        self, streams: tuple[IO[bytes], IO[bytes]], limit: int, kill: Callable[[], None], stop: threading.Event
    ) -> None:
        self.overflowed = False
        self._kill, self._stop, self._ended = kill, stop, False
        self._lock = threading.Lock()
        self._readers = [LimitedReader(stream, limit, self._overflow) for stream in streams]
        self._watch = threading.Thread(target=self._wait, daemon=True)
        self._watch.start()

    def _overflow(self) -> None:
        self.overflowed = True
        self._stop.set()

    def _wait(self) -> None:
        self._stop.wait()
        with self._lock:
            if not self._ended:
                self._kill()

    def finish(self) -> tuple[bytes, bytes]:
        """Returns what was read of both streams. Call it when the command has ended: nothing is killed afterwards."""
        with self._lock:
            self._ended = True
        stdout, stderr = (reader.finish() for reader in self._readers)
        self._stop.set()
        return stdout, stderr


class OutputPipes:
    """Two named pipes for the output of a command that cannot inherit descriptors. `read`: their ends to read."""

    def __init__(self) -> None:
        # Named as the folders of episodes, which are removed when their process is gone.
        self._folder = tempfile.TemporaryDirectory(prefix=f"tentalis-episode-{os.getpid()}-pipes-")
        self.paths = tuple(Path(self._folder.name, name) for name in ("stdout", "stderr"))
        self._held: list[int] = []

    def __enter__(self) -> Self:
        ends = []
        for path in self.paths:
            os.mkfifo(path, 0o600)
            end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            # As long as this process holds an end to write, the reader waits for the command.
            self._held.append(os.open(path, os.O_WRONLY))
            os.set_blocking(end, True)
            ends.append(os.fdopen(end, "rb"))
        self.read: tuple[IO[bytes], IO[bytes]] = (ends[0], ends[1])
        return self

    def end(self) -> None:
        """Ends both streams when the command has ended."""
        while self._held:
            os.close(self._held.pop())

    def __exit__(self, *error: object) -> None:
        self.end()
        self._folder.cleanup()
