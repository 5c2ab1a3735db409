"""Stores records on local disk while the broker does not take them.

One file per record, named by its event id: written to a temporary file, fsynced, renamed, and the folder fsynced, so
that a record file is always complete, even after a crash of the process or the machine. One process at a time uses the
folder, and only its owner can read it.
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

MAX_SPOOL_BYTES = 2**30

_SUFFIX, _DAMAGED_SUFFIX = ".record", ".damaged"


class SpoolTaken(Exception):
    """Another process uses the folder."""


class RecordSpoolFull(OSError):
    """The spool has reached its size limit, which protects disk space for other programs."""


@dataclass(frozen=True, slots=True)
class SpooledRecord:
    """A record ready to be sent. `since`: ms since the epoch; the record cannot be on the log before that time."""

    event_id: str
    topic: str
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    since: int

    def to_bytes(self) -> bytes:
        """Serialises the record as a line of JSON, followed by the value."""
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
    def from_bytes(cls, data: bytes) -> "SpooledRecord":
        """Parses a record. Raises ValueError for damaged bytes."""
        line, _, value = data.partition(b"\n")
        try:
            head = json.loads(line)
            if hashlib.sha256(value).hexdigest() != head["sha256"]:
                raise ValueError("the value does not match its sha256")
            headers = tuple((str(name), b64decode(text)) for name, text in head["headers"])
            return cls(head["event_id"], head["topic"], b64decode(head["key"]), value, headers, int(head["since"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a spooled record: {error!r}") from error


class SpoolEntry(NamedTuple):
    """The metadata of a record on disk. `size`: of its file, in bytes."""

    topic: str
    key: bytes
    since: int
    size: int


class RecordSpool:
    """The folder of spooled records. Every method may be called on any thread.

    Args:
        max_bytes: size limit of all records in the folder.
    Raises:
        SpoolTaken, OSError.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SPOOL_BYTES) -> None:
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
        for partial in folder.glob("*.tmp"):  # never acknowledged
            partial.unlink()
        self.set_aside_count = 0
        """Files set aside since the start; each needs manual inspection."""
        self._max_bytes = max_bytes
        self._reserved_bytes = 0  # bytes of the records held and of those being written
        self._entries: dict[str, SpoolEntry] = {}
        self._key_counts: Counter[bytes] = Counter()
        found = [(path, path.stat()) for path in folder.glob(f"*{_SUFFIX}")]
        for path, stat in sorted(found, key=lambda each: each[1].st_mtime_ns):
            if (record := self._read(path)) is not None:
                self._reserved_bytes += stat.st_size
                self._add_entry(record, stat.st_size)

    def __len__(self) -> int:
        return len(self._entries)

    def has_key(self, key: bytes) -> bool:
        """True if a record of this key is in the spool."""
        return key in self._key_counts

    def put(self, record: SpooledRecord) -> None:
        """Returns once the record is durable on disk; ignores a further record of the same id. Raises OSError
        (RecordSpoolFull) if the record is not stored; nothing is left of it then."""
        name, data = _file_name(record.event_id), record.to_bytes()
        with self._mutex:
            if record.event_id in self._entries:
                return
            if self._reserved_bytes + len(data) > self._max_bytes:
                raise RecordSpoolFull(
                    f"{len(self._entries)} turns wait in {self.folder}; another {len(data):,} bytes would exceed the "
                    f"limit of {self._max_bytes:,} bytes (spool_bytes)"
                )
            self._reserved_bytes += len(data)
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
                self._reserved_bytes -= len(data)
            temporary.unlink(missing_ok=True)
            (self.folder / name).unlink(missing_ok=True)
            raise
        self._add_entry(record, len(data))

    def remove(self, event_id: str) -> None:
        """Removes a record that is on the log; ignores an unknown id."""
        self._remove_entry(event_id)
        (self.folder / _file_name(event_id)).unlink(missing_ok=True)

    def set_aside(self, event_id: str, reason: object) -> None:
        """Removes a record that can never go to the log from the spool; keeps its file for manual inspection."""
        self._rename_damaged(self.folder / _file_name(event_id), reason)
        self._remove_entry(event_id)

    def _rename_damaged(self, path: Path, reason: object) -> None:
        log.error("%s is set aside as %s: %s", path, path.with_suffix(_DAMAGED_SUFFIX).name, reason)
        path.rename(path.with_suffix(_DAMAGED_SUFFIX))
        self.set_aside_count += 1

    def _add_entry(self, record: SpooledRecord, size: int) -> None:
        """Adds a record whose `size` is already counted in `_reserved_bytes`."""
        with self._mutex:
            if record.event_id in self._entries:
                self._reserved_bytes -= size
            else:
                self._entries[record.event_id] = SpoolEntry(record.topic, record.key, record.since, size)
                self._key_counts[record.key] += 1

    def _remove_entry(self, event_id: str) -> None:
        with self._mutex:
            if (entry := self._entries.pop(event_id, None)) is not None:
                self._reserved_bytes -= entry.size
                self._key_counts[entry.key] -= 1
                if not self._key_counts[entry.key]:
                    del self._key_counts[entry.key]

    def entries(self) -> dict[str, SpoolEntry]:
        """The records in the spool, by event id, oldest first."""
        with self._mutex:
            return dict(self._entries)

    def records(self, event_ids: Iterable[str]) -> Iterator[SpooledRecord]:
        """Yields these records, each read on demand; skips those removed meanwhile. Damaged files are set aside and
        logged."""
        for event_id in event_ids:
            record = self._read(self.folder / _file_name(event_id))
            if record is None:
                self._remove_entry(event_id)
            else:
                yield record

    def _read(self, path: Path) -> SpooledRecord | None:
        try:
            return SpooledRecord.from_bytes(path.read_bytes())
        except FileNotFoundError:
            return None  # removed meanwhile: it is on the log
        except ValueError as error:
            self._rename_damaged(path, error)
            return None

    def close(self) -> None:
        """Releases the folder for another process."""
        self._lock.close()

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_name(event_id: str) -> str:
    # Ids of other writers may hold characters that a file name cannot.
    return hashlib.sha256(event_id.encode()).hexdigest()[:40] + _SUFFIX
