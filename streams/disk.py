"""Keyed state on disk: one RocksDB per owned partition, a copy of its changelog that a restart need not read again.

The changelog stays the truth. A database is believed only if it belongs to exactly this changelog (cluster, topic, the
topic's own id, partition), was in use recently enough, and can be read; otherwise it is thrown away and made anew from
the changelog, with a line in the log that says why. What Faust's own RocksDB store does not do, and why this is not it,
is in docs/decisions/0010-state.md.

Keys of a database begin with a byte that says what they are:

- META: what it is a copy of, how far (the changelog offset after the last record that it holds), when, and how many
  values have an age.
- DATA + key: the value of the table.
- GRAVE + half hour + key: the offset of a deletion, as long as a late flush of an older value must be told from a new
  one. A changelog read from the beginning shows deletion and value; one read from here on shows the value alone.
- AGE + since + key: an index of the values to which the application gives an age, oldest first.
- AGELESS + key: an index of the others, which an application that gives ages at all looks at when it begins. Those with
  an age are too many for that.
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
from streams.processor import StateUnreadable, Table, applied_offset
from streams.state import Entry, Fold

log = logging.getLogger(__name__)

META, DATA, GRAVE, AGE, AGELESS = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04"
VERSION = 2
GRAVE_MS = CHANGELOG_MIN_LAG_MS // 2
IDLE_MS = 12 * 3600 * 1000
"""A database that nobody used for so long is made anew: brokers keep a deletion for a day (`delete.retention.ms`), and
one that was not seen would leave its value alive here for good."""
REWRITTEN_S = 24 * 3600
"""RocksDB rewrites every file that is older, and with it leaves out what was deleted or replaced: as often as the
changelog's own compaction (`max.compaction.lag.ms`), so that what somebody asked to forget goes from here as well."""
TIDY_S = 3600.0
GONE = ".gone"
CACHE_BYTES = 64 * 2**20
BUFFERS_BYTES = 64 * 2**20
"""Of all databases of a process together: blocks read, and writes not yet in a file."""

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
    """What the databases of one process share, so that their memory has one bound."""

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
        # Halves lie apart from the small values: headers are rewritten and compacted often, a half is written once.
        made.set_enable_blob_files(True)
        made.set_min_blob_size(2048)
        made.set_blob_file_size(32 * 2**20)
        made.set_enable_blob_gc(True)
        # By default three quarters of the blob files keep what was deleted from them until all of it is.
        made.set_blob_gc_age_cutoff(1.0)
        made.set_blob_compression_type(DBCompressionType.lz4())
        return made


class Database:
    """The RocksDB of one partition. Every method raises StateUnreadable where RocksDB cannot go on."""

    def __init__(self, path: Path, opened: Any, identity: str, age: Age | None) -> None:
        self.position = 0
        self.aged = 0
        """How many values have an age."""
        self.rows = DiskTable(self)
        self._path, self._db, self._identity, self._age = path, opened, identity, age
        self._graves: set[int] = set()

    def begin(self) -> str | None:
        """Goes on from where it was; otherwise why it cannot be believed."""
        meta = self.value(META)
        reason = _distrust(meta, self._identity)
        if meta is not None and reason is None:
            _, self.position, _, self.aged = _META.unpack_from(meta)
            self._graves = self._buckets()
        return reason

    # -- reading

    def value(self, raw: bytes) -> bytes | None:
        """The value of a key as it lies in the database."""
        try:
            found: bytes | None = self._db.get(raw)
        except Exception as error:
            raise self._damaged(error) from error
        return found

    def scan(self, prefix: bytes, start: bytes = b"", *, values: bool = True) -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, from `start` on, in order; with their values."""
        try:
            # Not Rdict.items(): where a block is damaged, that ends as if there were nothing more.
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
        """What is known of some keys: their values, or the deletions that are still remembered."""
        names = list(keys)
        found: dict[str, Entry] = {}
        if not names:
            return found
        try:
            for key, value in zip(names, self._db.get([_raw(key) for key in names]), strict=True):
                if value is not None:
                    found[key] = Entry(key, value, applied_offset(value))
            for bucket in sorted(self._graves):
                missing = [key for key in names if key not in found or found[key].value is None]
                graves = self._db.get([_grave(bucket, _raw(key)) for key in missing])
                for key, value in zip(missing, graves, strict=True):
                    if value is not None:
                        found[key] = Entry(key, None, _OFFSET.unpack(value)[0])
        except Exception as error:
            raise self._damaged(error) from error
        return found

    def size(self) -> int:
        """Bytes on disk, without the log of what is not in a file yet."""
        kinds = ("rocksdb.total-sst-files-size", "rocksdb.total-blob-file-size")
        return sum(int(self._db.property_int_value(kind) or 0) for kind in kinds)

    # -- writing

    def write(self, entries: Iterable[Entry], position: int) -> None:
        """Takes changes over, all or none, and that the changelog is known up to `position`."""
        from rocksdict import WriteBatch

        now = round(1000 * time.time())
        bucket = now // GRAVE_MS
        batch = WriteBatch(raw_mode=True)
        entries = list(entries)
        for entry in entries:
            raw = _raw(entry.key)
            if entry.value is None:
                batch.delete(raw)
                batch.put(_grave(bucket, raw), _OFFSET.pack(entry.offset))
                self._graves.add(bucket)
            else:
                batch.put(raw, entry.value)
        aged = self.aged + (0 if self._age is None else self._index(batch, entries, self._age))
        batch.put(META, _META.pack(VERSION, position, now, aged) + self._identity.encode())
        try:
            self._db.write(batch)
            for old in [old for old in self._graves if old < bucket - CHANGELOG_MIN_LAG_MS // GRAVE_MS]:
                self._db.delete_range(_grave(old, b""), _grave(old + 1, b""))
                self._graves.discard(old)
        except Exception as error:
            raise self._damaged(error) from error
        self.position, self.aged = position, aged

    def _index(self, batch: Any, entries: Sequence[Entry], age: Age) -> int:
        """Takes changes into both indexes; how many values more have an age then."""
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

    def forget_ages(self, before: int) -> None:
        """The index needs no entries older than this any more."""
        try:
            self._db.delete_range(AGE, _at(before))
        except Exception as error:
            raise self._damaged(error) from error

    def flush(self) -> None:
        """What was written so far will soon lie in files, where deletions have their effect one day."""
        try:
            # Not waiting for it: everything else of the process would wait for the disk.
            self._db.flush(wait=False)
        except Exception as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        """Nothing of it can be used any more."""
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - rocksdict raises no other
            # What was confirmed and is not in its files is on the changelog; it is closed all the same.
            log.warning("the state in %s was left behind as it is: %s", self._path, error)

    def _buckets(self) -> set[int]:
        found: set[int] = set()
        at = GRAVE
        while (key := next((key for key, _ in self.scan(GRAVE, at, values=False)), None)) is not None:
            found.add(_BUCKET.unpack_from(key, 1)[0])
            at = _grave(max(found) + 1, b"")
        return found

    def _damaged(self, error: Exception) -> StateUnreadable:
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return StateUnreadable(f"there is no room for the state in {self._path}: {error}")
        self.distrust()
        return StateUnreadable(f"the state in {self._path} cannot be read: {error}")

    def distrust(self) -> None:
        """It is made anew when it is opened next."""
        (self._path / DAMAGED).touch()


DAMAGED = "DAMAGED"
"""A file beside the database says that it was found damaged."""


def _grave(bucket: int, raw: bytes) -> bytes:
    return GRAVE + _BUCKET.pack(bucket) + raw


class DiskTable(Table):
    """A partition as the processor sees it.

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
    """Reads the rest of a changelog partition into its database; see `streams.state.Fold` for which record wins."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: list[Entry] = []
        self._stale: set[str] = set()
        self.read = 0

    @property
    def position(self) -> int:
        """The changelog offset from which on it has to be read."""
        return self._database.position

    def add(self, entry: Entry) -> None:
        """The next record of the changelog, in log order."""
        self.read += 1
        self._pending.append(entry)

    def settle(self, position: int) -> None:
        """Everything before `position` was added."""
        if not self._pending and position == self._database.position:
            return
        keys = {entry.key for entry in self._pending}
        fold = Fold(self._database.known(keys))
        for entry in self._pending:
            fold.add(entry)
        self._pending = []
        self._stale = (self._stale - keys) | fold.stale
        self._database.write(fold.changed(), position)

    def overwritten(self) -> list[Entry]:
        """Entries that won, but are not the last of their key on the log."""
        known = self._database.known(sorted(self._stale))
        return [known[key] for key in sorted(known)]


class DiskStore:
    """What the changelog confirmed, on disk, per owned partition. Same use as `streams.state.StateStore`.

    Args:
        folder: of this application; every process takes a folder of its own in it (see `_own_folder`).
        age: what a value is ordered by in the index of ages, None for one that is not; without it there are no indexes.
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
        """What the changelog is (see `identity_of`); a database of another is made anew."""
        self._resources = Resources()
        self._open: dict[int, Database] = {}
        self._tidied = time.monotonic()
        self.rebuilt = 0
        """Databases that were not believed."""
        self._sweep()

    def open(self, partition: int, *, anew: bool = False) -> DiskFold:
        """The database of a partition, to be brought up to date.

        Args:
            anew: whatever is there is not believed.
        Raises:
            StoreLocked: another process has it open.
        """
        self.drop(partition)
        path, identity = self._folder / str(partition), f"{self.identity}[{partition}]"
        if path.exists() and (reason := "" if anew else self._try(partition, path, identity)) is not None:
            self.rebuilt += 1
            if reason:
                log.warning("the state in %s %s: made anew from the changelog", path, reason)
            _discard(path)
        if partition not in self._open:
            path.mkdir(parents=True)
            database = self._open[partition] = Database(path, self._database(path), identity, self._age)
            database.write((), 0)
        return DiskFold(self._open[partition])

    def drop(self, partition: int) -> None:
        """Closes a partition that is gone. It stays on disk, in case it comes back."""
        database = self._open.pop(partition, None)
        if database is not None:
            database.close()

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition; `read` is called for every entry that is read in it."""
        database = self._open[partition]
        return database.rows if read is None else DiskTable(database, read)

    def apply(self, partition: int, entries: Sequence[Entry], last: int = -1) -> None:
        """Takes over confirmed changes.

        Args:
            last: the changelog offset of the last one.
        """
        database = self._open[partition]
        # If somebody else wrote in between, the rest is read again after the next start.
        follows = last - len(entries) + 1 == database.position
        database.write(entries, last + 1 if follows else database.position)
        if time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            for owned in self._open.values():
                owned.flush()
            self._sweep()

    def distrust(self, partition: int) -> None:
        """A partition is damaged: it is made anew from the changelog when it is opened next."""
        self._open[partition].distrust()

    def size(self) -> int:
        """Bytes on disk of the owned partitions."""
        return sum(database.size() for database in self._open.values())

    def memory(self) -> int:
        """Bytes that the databases hold in memory: blocks read, and writes not yet in a file."""
        return self._resources.used()

    def close(self) -> None:
        """Closes all partitions and gives the folder back."""
        for partition in list(self._open):
            self.drop(partition)
        self._lock.close()

    def _sweep(self) -> None:
        """Removes what nobody has used for so long that it would not be believed, also where workers were that are
        gone: what was deleted from the changelog meanwhile lies there still."""
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
        """Opens what is there; otherwise why it cannot be believed."""
        if (path / DAMAGED).exists():
            return "was damaged when it was last in use"
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
                raise StoreLocked(f"another process uses the state in {path}: give each its own --state-dir") from error
            raise StateUnreadable(str(error)) from error


def _distrust(meta: bytes | None, identity: str) -> str | None:
    """Why a database is not believed; None if it is."""
    if meta is None or len(meta) < _META.size:
        return "does not say what it is a copy of"
    version, _, used, _ = _META.unpack_from(meta)
    found = meta[_META.size :].decode("utf-8", "replace")
    if version != VERSION:
        return f"has the format {version}, this version reads {VERSION}"
    if found != identity:
        return f"is a copy of another changelog ({found}; here it is {identity})"
    idle = time.time() - used / 1000
    if abs(1000 * idle) > IDLE_MS:  # a time to come: the clock was set, and how long it really was is not known
        return f"was last in use {idle / 3600:.0f} hours ago, and deletions are known for {IDLE_MS // 3600_000} only"
    return None


def _own_folder(folder: Path, name: str) -> tuple[Path, IO[bytes]]:
    """The first of NAME, NAME-1, NAME-2 ... that no other process has, and its lock.

    A worker that was killed leaves its folder to its successor; one that was only stopped keeps it, and must not keep
    its successor from working.
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
    """The lock of a process's folder, None if it has an owner."""
    lock = (own / "owner").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _idle(path: Path) -> bool:
    # Of the folder: its files come and go with every flush, under the hands of whoever owns it.
    try:
        return 1000 * (time.time() - path.stat().st_mtime) > IDLE_MS
    except FileNotFoundError:
        return False


def _discard(path: Path) -> None:
    """Removes a database. Under another name first: what is left of one that was removed in part might be believed."""
    gone = path.with_suffix(GONE)
    if path != gone:
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone)


def identity_of(client: Mapping[str, Any], topic: str) -> str:
    """What a changelog is: the cluster, the topic's name, and the id it got when it was created.

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
