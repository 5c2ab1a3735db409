"""Keyed state on disk: one RocksDB per owned partition, a copy of its changelog, so that a restart reads only the rest.

The changelog is the source of truth. A database is used only if it is a copy of exactly this changelog (cluster, topic,
topic id, partition), was used recently enough, and is readable; otherwise it is deleted and rebuilt from the changelog,
and a log line gives the reason. docs/decisions/0010-state.md says why Faust's own RocksDB store is not used.

The first byte of a database key is its kind:

- META: the changelog that the database is a copy of, its position (the changelog offset after the last record that it
  holds), the time of the last write, and the number of values with an age.
- DATA + key: the value of the table.
- TOMBSTONE + half hour + key: the offset of a deletion. It is kept as long as a late flush of an older value
  must be distinguished from a new value: a changelog read from the beginning shows both the deletion and the late
  value, but one read from the database's position shows only the value.
- AGE + since + key: an index of the values with an age, oldest first.
- SOURCES: the changelog's record of the inputs (`streams.runtime.topic_guard`).
- AGELESS + key: an index of the values without an age. An application with ages reads these when it starts; the
  values with an age are too many to read.
"""

import errno
import fcntl
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from schemas.topics import CHANGELOG_MIN_LAG_MS
from streams.runtime.processor import StateTable, StateUnreadable, applied_offset
from streams.runtime.state import ChangelogFold, Entry

log = logging.getLogger(__name__)

META, DATA, TOMBSTONE, AGE, AGELESS, SOURCES = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"
VERSION = 2
TOMBSTONE_MS = CHANGELOG_MIN_LAG_MS // 2
IDLE_MS = 12 * 3600 * 1000
"""A database unused for this long is rebuilt: brokers keep a deletion for a day (`delete.retention.ms`), and a deletion
that the database missed would leave its value alive forever."""
REWRITTEN_S = 24 * 3600
"""RocksDB rewrites every older file and drops deleted and replaced values. This is as often as the changelog is
compacted (`max.compaction.lag.ms`), so that erased data leaves the disk as well."""
TIDY_S = 3600.0
GONE = ".gone"
CACHE_BYTES = 64 * 2**20
BUFFERS_BYTES = 64 * 2**20
"""Limits over all databases of a process: cached blocks (`CACHE_BYTES`), and writes not yet in a file."""

_META = struct.Struct(">Bqqq")  # version, position, wall clock in ms, values with an age
_OFFSET = struct.Struct(">q")
_BUCKET = struct.Struct(">I")
_SINCE = struct.Struct(">Q")
_SIGN = 1 << 63

Age = Callable[[str, bytes], int | None]


class StoreLocked(Exception):
    """Another process has the database open."""


def _at(since: int) -> bytes:
    return AGE + _SINCE.pack(max(0, since + _SIGN))


def _raw(key: str) -> bytes:
    return DATA + key.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw[1:].decode("utf-8", "surrogateescape")


class Resources:
    """Memory shared by the databases of one process, so that one limit bounds all of it."""

    def __init__(self) -> None:
        from rocksdict import Cache, WriteBufferManager

        self._cache = Cache(CACHE_BYTES)
        self._buffers = WriteBufferManager(BUFFERS_BYTES, False)

    def used(self) -> int:
        """Bytes of the cache and the buffers."""
        return int(self._cache.get_usage() + self._buffers.get_usage())

    def options(self) -> Any:
        """Options of a database."""
        from rocksdict import BlockBasedOptions, DBCompressionType, Options

        blocks = BlockBasedOptions()
        blocks.set_block_cache(self._cache)
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        made = Options(raw_mode=True)
        made.create_if_missing(True)
        made.set_block_based_table_factory(blocks)
        made.set_compression_type(DBCompressionType.lz4())
        made.set_write_buffer_manager(self._buffers)
        made.set_write_buffer_size(16 * 2**20)
        made.set_max_open_files(128)
        made.set_keep_log_file_num(2)
        # Halves are stored apart from small values: headers are rewritten and compacted often, a half is written once.
        made.set_enable_blob_files(True)
        made.set_min_blob_size(2048)
        made.set_blob_file_size(32 * 2**20)
        made.set_enable_blob_gc(True)
        # The default keeps deleted values in three quarters of the blob files until every value in a file is deleted.
        made.set_blob_gc_age_cutoff(1.0)
        made.set_blob_compression_type(DBCompressionType.lz4())
        return made


class Database:
    """The RocksDB of one partition. Every method raises StateUnreadable if RocksDB fails."""

    def __init__(self, path: Path, opened: Any, identity: str, age: Age | None) -> None:
        self.position = 0
        self.aged = 0
        """The number of values with an age."""
        self.sources: bytes | None = None
        """The record of the inputs; the next `write` keeps it."""
        self.rows = DiskTable(self)
        self._path, self._db, self._identity, self._age = path, opened, identity, age
        self._tombstones: set[int] = set()

    def begin(self) -> str | None:
        """Loads the database's position; returns None, or the reason why the database cannot be used."""
        meta = self.value(META)
        reason = _distrust(meta, self._identity)
        if meta is not None and reason is None:
            _, self.position, _, self.aged = _META.unpack_from(meta)
            self.sources = self.value(SOURCES)
            self._tombstones = self._buckets()
        return reason

    # -- reading

    def value(self, raw: bytes) -> bytes | None:
        """The value of a database key."""
        try:
            found: bytes | None = self._db.get(raw)
        except Exception as error:
            raise self._damaged(error) from error
        return found

    def scan(self, prefix: bytes, start: bytes = b"", *, values: bool = True) -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, from `start` on, in order, with their values (b"" if not `values`)."""
        try:
            # Not Rdict.items(): it ends silently at a damaged block.
            cursor = self._db.iter()
            cursor.seek(start or prefix)
            while cursor.valid():
                key = cursor.key()
                if not key.startswith(prefix):
                    break
                yield key, cursor.value() if values else b""
                cursor.next()
            cursor.status()
        except Exception as error:
            raise self._damaged(error) from error

    def known(self, keys: Iterable[str]) -> dict[str, Entry]:
        """The latest known entries of some keys: their values, or deletions whose tombstones are still kept."""
        names = list(keys)
        found: dict[str, Entry] = {}
        if not names:
            return found
        try:
            for key, value in zip(names, self._db.get([_raw(key) for key in names]), strict=True):
                if value is not None:
                    found[key] = Entry(key, value, applied_offset(value))
            for bucket in sorted(self._tombstones):
                missing = [key for key in names if key not in found or found[key].value is None]
                tombstones = self._db.get([_tombstone(bucket, _raw(key)) for key in missing])
                for key, value in zip(missing, tombstones, strict=True):
                    if value is not None:
                        found[key] = Entry(key, None, _OFFSET.unpack(value)[0])
        except Exception as error:
            raise self._damaged(error) from error
        return found

    def size(self) -> int:
        """Bytes on disk, without RocksDB's log of writes that are not yet in a file."""
        kinds = ("rocksdb.total-sst-files-size", "rocksdb.total-blob-file-size")
        return sum(int(self._db.property_int_value(kind) or 0) for kind in kinds)

    # -- writing

    def write(self, entries: Iterable[Entry], position: int) -> None:
        """Applies changes and sets the position to `position`, atomically."""
        from rocksdict import WriteBatch

        now = round(1000 * time.time())
        bucket = now // TOMBSTONE_MS
        batch = WriteBatch(raw_mode=True)
        entries = list(entries)
        for entry in entries:
            raw = _raw(entry.key)
            if entry.value is None:
                batch.delete(raw)
                batch.put(_tombstone(bucket, raw), _OFFSET.pack(entry.offset))
                self._tombstones.add(bucket)
            else:
                batch.put(raw, entry.value)
        aged = self.aged + (0 if self._age is None else self._index(batch, entries, self._age))
        batch.put(META, _META.pack(VERSION, position, now, aged) + self._identity.encode())
        if self.sources is not None:
            batch.put(SOURCES, self.sources)
        try:
            self._db.write(batch)
            for old in [old for old in self._tombstones if old < bucket - CHANGELOG_MIN_LAG_MS // TOMBSTONE_MS]:
                self._db.delete_range(_tombstone(old, b""), _tombstone(old + 1, b""))
                self._tombstones.discard(old)
        except Exception as error:
            raise self._damaged(error) from error
        self.position, self.aged = position, aged

    def _index(self, batch: Any, entries: Sequence[Entry], age: Age) -> int:
        """Adds changes to both indexes; returns by how much the number of values with an age grows."""
        raws = {_raw(entry.key) for entry in entries}
        try:
            ageless = {raw for raw, found in self._get(AGELESS, raws) if found is not None}
            aged = {raw for raw, found in self._get(b"", raws - ageless) if found is not None}
        except Exception as error:
            raise self._damaged(error) from error
        before = len(aged)
        for entry in entries:
            raw = _raw(entry.key)
            since = None if entry.value is None else age(entry.key, entry.value)
            if since is not None:
                batch.put(_at(since) + raw, b"")
            (aged.discard if since is None else aged.add)(raw)
            if entry.value is not None and since is None:
                batch.put(AGELESS + raw, b"")
                ageless.add(raw)
            elif raw in ageless:
                batch.delete(AGELESS + raw)
                ageless.discard(raw)
        return len(aged) - before

    def _get(self, prefix: bytes, raws: Iterable[bytes]) -> Iterator[tuple[bytes, bytes | None]]:
        keys = list(raws)
        return zip(keys, self._db.get([prefix + key for key in keys]) if keys else (), strict=True)

    def clear(self) -> None:
        """Drops all values, tombstones and index entries."""
        try:
            self._db.delete_range(DATA, SOURCES)
        except Exception as error:
            raise self._damaged(error) from error
        self.aged, self._tombstones = 0, set()

    def forget_ages(self, before: int) -> None:
        """Drops the entries of the age index below `before`."""
        try:
            self._db.delete_range(AGE, _at(before))
        except Exception as error:
            raise self._damaged(error) from error

    def flush(self) -> None:
        """Starts to write buffered data to files, so that compaction can drop deleted values."""
        try:
            # Does not wait: the whole process would wait for the disk.
            self._db.flush(wait=False)
        except Exception as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        """Closes the database."""
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - rocksdict raises no other
            # Confirmed changes that are missing from its files are on the changelog.
            log.warning("the state in %s could not be closed, and is left as it is: %s", self._path, error)

    def _buckets(self) -> set[int]:
        found: set[int] = set()
        at = TOMBSTONE
        while (key := next((key for key, _ in self.scan(TOMBSTONE, at, values=False)), None)) is not None:
            found.add(_BUCKET.unpack_from(key, 1)[0])
            at = _tombstone(max(found) + 1, b"")
        return found

    def _damaged(self, error: Exception) -> StateUnreadable:
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return StateUnreadable(f"no space left for the state in {self._path}: {error}")
        self.distrust()
        return StateUnreadable(f"the state in {self._path} cannot be read: {error}")

    def distrust(self) -> None:
        """Marks the database as damaged: the next `open` rebuilds it."""
        (self._path / DAMAGED).touch()


DAMAGED = "DAMAGED"
"""Name of the file that marks a database as damaged."""


def _tombstone(bucket: int, raw: bytes) -> bytes:
    return TOMBSTONE + _BUCKET.pack(bucket) + raw


class DiskTable(StateTable):
    """A partition's state as the processor sees it.

    Args:
        read: called for every entry that is read.
    """

    def __init__(self, database: Database, read: Callable[[], None] = lambda: None) -> None:
        self._database, self._read = database, read

    def __getitem__(self, key: str) -> bytes:
        self._read()
        value = self._database.value(_raw(key))
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        self._read()
        value = self._database.value(_raw(key))
        return default if value is None else value

    def __iter__(self) -> Iterator[str]:
        return self.names("")

    def __len__(self) -> int:
        return sum(1 for _ in self.names(""))

    def names(self, prefix: str) -> Iterator[str]:
        for raw, _ in self._scan(_raw(prefix), values=False):
            yield _text(raw)

    def scan(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        for raw, value in self._scan(_raw(prefix)):
            yield _text(raw), value

    def aged(self, since: int) -> Iterator[tuple[int, str]]:
        for raw, _ in self._scan(AGE, _at(since), values=False):
            yield _SINCE.unpack_from(raw, 1)[0] - _SIGN, _text(raw[1 + _SINCE.size :])

    def count_aged(self) -> int:
        return self._database.aged

    def ageless(self) -> Iterator[str]:
        for raw, _ in self._scan(AGELESS, values=False):
            yield _text(raw[1:])

    def forget_ages(self, before: int) -> None:
        self._database.forget_ages(before)

    def _scan(self, prefix: bytes, start: bytes = b"", *, values: bool = True) -> Iterator[tuple[bytes, bytes]]:
        for item in self._database.scan(prefix, start, values=values):
            self._read()
            yield item


class DiskFold:
    """Reads the rest of a changelog partition into its database; `state.ChangelogFold` decides which record wins."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: list[Entry] = []
        self._stale: set[str] = set()
        self.read = 0

    @property
    def position(self) -> int:
        """The changelog offset to read from."""
        return self._database.position

    @property
    def sources(self) -> bytes | None:
        """The changelog's record of the inputs, so far."""
        return self._database.sources

    @sources.setter
    def sources(self, value: bytes | None) -> None:
        self._database.sources = value

    def add(self, entry: Entry) -> None:
        """Takes the next record of the changelog, in log order."""
        self.read += 1
        self._pending.append(entry)

    def settle(self, position: int) -> None:
        """Writes the added records: everything before `position` was added."""
        if not self._pending and position == self._database.position:
            return
        keys = {entry.key for entry in self._pending}
        fold = ChangelogFold(self._database.known(keys))
        for entry in self._pending:
            fold.add(entry)
        self._pending = []
        self._stale = (self._stale - keys) | fold.stale
        self._database.write(fold.changed(), position)

    def restart(self) -> None:
        """Drops everything that was added: the state was given up here."""
        self._pending, self._stale = [], set()
        self._database.clear()

    def overwritten(self) -> list[Entry]:
        """The recovered entries whose key has a later, stale entry on the log."""
        known = self._database.known(sorted(self._stale))
        return [known[key] for key in sorted(known)]


class DiskStore:
    """The confirmed state on disk, per owned partition. Has the interface of `streams.runtime.state.StateStore`.

    Args:
        folder: the application's folder; every process takes its own subfolder (see `_own_folder`).
        age: returns the age under which a value is indexed, None for a value that is not indexed. Without this function
            there is no age index.
        name: the name of the subfolder.
    """

    def __init__(
        self,
        folder: Path,
        age: Age | None = None,
        name: str = "worker",
    ) -> None:
        self._folder, self._lock = _own_folder(folder, name)
        self._age = age
        self.identity = ""
        """The changelog's identity (see `identity_of`); a database with another identity is rebuilt."""
        self._resources = Resources()
        self._open: dict[int, Database] = {}
        self._tidied = time.monotonic()
        self.rebuilt = 0
        """The number of databases that were rebuilt."""
        self._sweep()

    def open(self, partition: int, *, anew: bool = False) -> DiskFold:
        """Opens the database of a partition, to read the rest of the changelog into it.

        Args:
            anew: rebuild it, even if it is usable.
        Raises:
            StoreLocked: another process has it open.
        """
        self.drop(partition)
        path, identity = self._folder / str(partition), f"{self.identity}[{partition}]"
        if path.exists() and (reason := "" if anew else self._try(partition, path, identity)) is not None:
            self.rebuilt += 1
            if reason:
                log.warning("the state in %s %s: rebuilt from the changelog", path, reason)
            _discard(path)
        if partition not in self._open:
            path.mkdir(parents=True)
            database = self._open[partition] = Database(path, self._database(path), identity, self._age)
            database.write((), 0)
        return DiskFold(self._open[partition])

    def drop(self, partition: int) -> None:
        """Closes a revoked partition. It stays on disk, in case it is assigned again."""
        database = self._open.pop(partition, None)
        if database is not None:
            database.close()

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition's entries. It calls `read` for each entry that is read through it."""
        database = self._open[partition]
        return database.rows if read is None else DiskTable(database, read)

    def apply(self, partition: int, entries: Sequence[Entry], last: int = -1) -> None:
        """Applies confirmed changes.

        Args:
            last: the changelog offset of the last one.
        """
        database = self._open[partition]
        # If another writer wrote in between, the position stays, and the rest is read again after the next start.
        follows = last - len(entries) + 1 == database.position
        database.write(entries, last + 1 if follows else database.position)
        if time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            for owned in self._open.values():
                owned.flush()
            self._sweep()

    def wrote_sources(self, partition: int, value: bytes, last: int) -> None:
        """Notes the record of the inputs that was written to the changelog, at offset `last`."""
        database = self._open[partition]
        database.sources = value
        database.write((), last + 1 if last == database.position else database.position)

    def distrust(self, partition: int) -> None:
        """Marks a partition as damaged: the next `open` rebuilds it from the changelog."""
        self._open[partition].distrust()

    def size(self) -> int:
        """Bytes on disk of the owned partitions."""
        return sum(database.size() for database in self._open.values())

    def memory(self) -> int:
        """Bytes that the databases hold in memory: cached blocks, and writes not yet in a file."""
        return self._resources.used()

    def close(self) -> None:
        """Closes all partitions and releases the folder."""
        for partition in list(self._open):
            self.drop(partition)
        self._lock.close()

    def _sweep(self) -> None:
        """Deletes databases unused for so long that they would be rebuilt, also those of workers that are gone: they
        still hold values that were deleted from the changelog meanwhile."""
        for folder in self._folder.parent.iterdir():
            left = [path for path in folder.glob("*/") if _idle(path) or path.suffix == GONE]
            if folder == self._folder:
                for path in left:
                    if not (path.name.isdigit() and int(path.name) in self._open):
                        _discard(path)
            elif left and (lock := _locked(folder)) is not None:
                with lock:
                    for path in left:
                        _discard(path)

    def _try(self, partition: int, path: Path, identity: str) -> str | None:
        """Opens an existing database; returns None, or the reason why it cannot be used."""
        if (path / DAMAGED).exists():
            return "was damaged when it was last used"
        try:
            opened = self._database(path)
        except StateUnreadable as error:
            return f"cannot be opened ({error.__cause__})"
        database = Database(path, opened, identity, self._age)
        try:
            reason = database.begin()
        except StateUnreadable as error:
            reason = f"cannot be read ({error.__cause__})"
        if reason is None:
            self._open[partition] = database
        else:
            database.close()
        return reason

    def _database(self, path: Path) -> Any:
        from rocksdict import Rdict

        try:
            opened = Rdict(str(path), options=self._resources.options())
            opened.set_options({"periodic_compaction_seconds": str(REWRITTEN_S)})
            return opened
        except Exception as error:
            if any(words in str(error) for words in ("While lock file", "lock hold by current process")):
                raise StoreLocked(
                    f"another process uses the state in {path}: give each process its own --state-dir"
                ) from error
            raise StateUnreadable(str(error)) from error


def _distrust(meta: bytes | None, identity: str) -> str | None:
    """The reason why a database cannot be used; None if it can."""
    if meta is None or len(meta) < _META.size:
        return "does not name the changelog that it is a copy of"
    version, _, used, _ = _META.unpack_from(meta)
    found = meta[_META.size :].decode("utf-8", "replace")
    if version != VERSION:
        return f"has format {version}, but this version reads format {VERSION}"
    if found != identity:
        return f"is a copy of another changelog ({found}; here it is {identity})"
    idle = time.time() - used / 1000
    if abs(1000 * idle) > IDLE_MS:  # in the future: the clock was set, so the idle time is unknown
        return f"was last in use {idle / 3600:.0f} hours ago (limit: {IDLE_MS // 3600_000} hours, to miss no deletion)"
    return None


def _own_folder(folder: Path, name: str) -> tuple[Path, IO[bytes]]:
    """The first of NAME, NAME-1, NAME-2 ... that no other process has locked, and its lock.

    A killed worker leaves its folder to its successor. A worker that was only frozen keeps its folder, and its
    successor takes the next one.
    """
    number = 0
    while True:
        own = folder / (f"{name}-{number}" if number else name)
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _locked(own)
        if lock is not None:
            return own, lock
        number += 1


def _locked(own: Path) -> IO[bytes] | None:
    """The lock of a process's folder, None if another process holds it."""
    lock = (own / "owner").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _idle(path: Path) -> bool:
    # The folder's time, not that of its files: the owner creates and deletes files with every flush.
    try:
        return 1000 * (time.time() - path.stat().st_mtime) > IDLE_MS
    except FileNotFoundError:
        return False


def _discard(path: Path) -> None:
    """Deletes a database. It is renamed first, so that a partly deleted database is never opened."""
    gone = path.with_suffix(GONE)
    if path != gone:
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone)


def identity_of(client: Mapping[str, Any], topic: str) -> str:
    """The identity of a changelog: the cluster, the topic's name, and the id that the topic got at its creation.

    Args:
        client: librdkafka settings.
    Raises:
        KafkaException: the broker does not answer, or refuses.
    """
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(dict(client))
    cluster = admin.list_topics(topic, timeout=15).cluster_id
    described = admin.describe_topics(TopicCollection([topic]), request_timeout=15)[topic].result(20)
    return f"{cluster}/{topic}/{described.topic_id}"
