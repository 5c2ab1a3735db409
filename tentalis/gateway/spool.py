"""Records on local disk, for as long as the broker does not take them.

One file per record, named by its event id: written beside, fsynced, renamed, and the folder fsynced, so that a file of
that name is whole whenever the process or the machine stops. The folder belongs to one process at a time, and is its
owner's alone.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

MOST_BYTES = 2**30

_SUFFIX, _BAD = ".record", ".damaged"


class SpoolTaken(Exception):
    """Another process has the folder."""


class SpoolFull(OSError):
    """As much waits here as may: another record would take the disk from somebody else."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A record as it is to be sent. `since`: ms since the epoch, before which it cannot have reached the log."""

    event_id: str
    topic: str
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    since: int

    def to_bytes(self) -> bytes:
        """A line of JSON, then the value."""
        head = {
            "event_id": self.event_id,
            "topic": self.topic,
            "key": b64encode(self.key).decode(),
            "headers": [[name, b64encode(value).decode()] for name, value in self.headers],
            "since": self.since,
            "sha256": hashlib.sha256(self.value).hexdigest(),
        }
        return json.dumps(head).encode() + b"\n" + self.value

    @classmethod
    def of(cls, data: bytes) -> "Spooled":
        """Raises ValueError for bytes that are damaged."""
        line, _, value = data.partition(b"\n")
        try:
            head = json.loads(line)
            if hashlib.sha256(value).hexdigest() != head["sha256"]:
                raise ValueError("the value is not what its sha256 says")
            headers = tuple((str(name), b64decode(text)) for name, text in head["headers"])
            return cls(head["event_id"], head["topic"], b64decode(head["key"]), value, headers, int(head["since"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a spooled record: {error!r}") from error


class Held(NamedTuple):
    """What is known of a record on disk without reading it. `size`: of its file, in bytes."""

    topic: str
    key: bytes
    since: int
    size: int


class Spool:
    """The folder. Every method may be called on any thread.

    Args:
        most_bytes: of the records that wait here.
    Raises:
        SpoolTaken, OSError.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._lock: IO[bytes] = (folder / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SpoolTaken(
                f"another gateway uses the spool {folder}: give each its own --gateway-id or --spool-dir"
            ) from error
        self._mutex = threading.Lock()
        for torn in folder.glob("*.tmp"):  # never acknowledged to anybody
            torn.unlink()
        self.aside = 0
        """Files set aside since the start: each needs a person."""
        self._most = most_bytes
        self._taken = 0  # bytes of what is held, and of what is being written
        self._held: dict[str, Held] = {}
        self._keys: Counter[bytes] = Counter()
        found = [(path, path.stat()) for path in folder.glob(f"*{_SUFFIX}")]
        for path, known in sorted(found, key=lambda each: each[1].st_mtime_ns):
            if (record := self._read(path)) is not None:
                self._taken += known.st_size
                self._hold(record, known.st_size)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, key: bytes) -> bool:
        """Whether a record of this key is here."""
        return key in self._keys

    def put(self, record: Spooled) -> None:
        """Returns once the record is on disk for good; of an id the first stays. Raises OSError (SpoolFull): it is not,
        and nothing is left of it."""
        name, data = _name(record.event_id), record.to_bytes()
        with self._mutex:
            if record.event_id in self._held:
                return
            if self._taken + len(data) > self._most:
                raise SpoolFull(
                    f"{len(self._held)} turns wait in {self.folder}, and with another {len(data):,} bytes they would "
                    f"take more than the {self._most:,} that they may (spool_bytes)"
                )
            self._taken += len(data)
        temporary = self.folder / f"{name}.{threading.get_ident()}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.folder / name)
            self._sync_folder()
        except OSError:
            with self._mutex:
                self._taken -= len(data)
            temporary.unlink(missing_ok=True)
            (self.folder / name).unlink(missing_ok=True)
            raise
        self._hold(record, len(data))

    def remove(self, event_id: str) -> None:
        """Forgets a record that is on the log; one that is not here is no error."""
        self._let_go(event_id)
        (self.folder / _name(event_id)).unlink(missing_ok=True)

    def set_aside(self, event_id: str, why: object) -> None:
        """Takes a record out that can never go to the log; its file stays for a person."""
        self._damaged(self.folder / _name(event_id), why)
        self._let_go(event_id)

    def _damaged(self, path: Path, why: object) -> None:
        log.error("%s is set aside as %s: %s", path, path.with_suffix(_BAD).name, why)
        path.rename(path.with_suffix(_BAD))
        self.aside += 1

    def _hold(self, record: Spooled, size: int) -> None:
        """`size` is taken already."""
        with self._mutex:
            if record.event_id in self._held:
                self._taken -= size
            else:
                self._held[record.event_id] = Held(record.topic, record.key, record.since, size)
                self._keys[record.key] += 1

    def _let_go(self, event_id: str) -> None:
        with self._mutex:
            if (held := self._held.pop(event_id, None)) is not None:
                self._taken -= held.size
                self._keys[held.key] -= 1
                if not self._keys[held.key]:
                    del self._keys[held.key]

    def held(self) -> dict[str, Held]:
        """What is here now, by event id, oldest first."""
        with self._mutex:
            return dict(self._held)

    def records(self, event_ids: Iterable[str]) -> Iterator[Spooled]:
        """These, each read when it is asked for; none of what is gone meanwhile. Damaged files are set aside and named
        in the log."""
        for event_id in event_ids:
            record = self._read(self.folder / _name(event_id))
            if record is None:
                self._let_go(event_id)
            else:
                yield record

    def _read(self, path: Path) -> Spooled | None:
        try:
            return Spooled.of(path.read_bytes())
        except FileNotFoundError:
            return None  # on the log by now
        except ValueError as error:
            self._damaged(path, error)
            return None

    def close(self) -> None:
        """Lets another process have the folder."""
        self._lock.close()

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _name(event_id: str) -> str:
    # Ids of other writers may hold anything, and a file name may not.
    return hashlib.sha256(event_id.encode()).hexdigest()[:40] + _SUFFIX
