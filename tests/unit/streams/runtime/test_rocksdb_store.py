"""State on disk: which databases are believed, what a restart reads of the changelog, and which record wins."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import topics
from streams.apps.join import closed_tasks
from streams.apps.join.processor import JoinProcessor
from streams.apps.join.state import TASK, JoinState, Phase, encode_task
from streams.fold.clock import DAY_MS, encode_clock
from streams.runtime.delivery import BatchRunner, Store
from streams.runtime.dlq import Produce
from streams.runtime.processor import DamagedState, LogRecord, StateTable, StateUnreadable, stamped
from streams.runtime.rocksdb_store import (
    BUFFERS_BYTES,
    CACHE_BYTES,
    IDLE_MS,
    Database,
    DiskFold,
    DiskStore,
    StoreLocked,
)
from streams.runtime.state import ChangelogFold, Entry, StateStore, entry_of
from streams.runtime.worker import StreamSettings, _Worker
from tentalis.dlq.limits import DeadLetterLimits
from tests.support.join_support import CODEC, PARTITION, head, record_at, sample, score, tick
from tests.support.topics_unchanged import TopicsUnchanged


def put(key: str, offset: int, text: str = "") -> Entry:
    return Entry(key, stamped(offset, text.encode()), offset)


def gone(key: str, offset: int) -> Entry:
    return Entry(key, None, offset)


class Bench:
    """A changelog, and workers that keep a copy of it in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[Entry] = []
        self.store: DiskStore | None = None
        self.read = 0
        self.lost: list[Entry] = []
        self.identity = "cluster/app-state-changelog/id"

    def start(self, *, anew: bool = False) -> dict[str, bytes]:
        """A worker that begins; the state that it has then."""
        self.stop()
        self.store = store = DiskStore(self.folder, lambda key, value: None)
        store.identity = self.identity
        fold = store.open(0, anew=anew)
        for entry in self.log[fold.position :]:
            fold.add(entry)
        fold.settle(len(self.log))
        self.read, self.lost = fold.read, fold.overwritten()
        return dict(store.entries(0))

    def write(self, *entries: Entry, confirmed: bool = True) -> None:
        """A flush of this worker: to the changelog, and unless it is killed in between to its database."""
        self.log += entries
        if confirmed:
            assert self.store is not None
            self.store.apply(0, entries, len(self.log) - 1)

    def stop(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None

    def whole(self) -> ChangelogFold:
        """The changelog, read from the beginning."""
        fold = ChangelogFold()
        for entry in self.log:
            fold.add(entry)
        return fold


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "rocksdb")
    yield made
    made.stop()


@pytest.mark.parametrize("kind", ["memory", "rocksdb"])
def test_the_store_shows_what_was_confirmed_and_nothing_else(kind: str, bench: Bench) -> None:
    store: Store
    if kind == "memory":
        store = StateStore()
    else:
        bench.start()
        assert bench.store is not None
        store = bench.store
    store.apply(0, [put("a", 1), put("\udcff", 1), put("b", 2), gone("a", 2)], 3)
    entries = store.entries(0)
    assert dict(entries) == {"b": stamped(2, b""), "\udcff": stamped(1, b"")}
    assert (len(entries), "b" in entries, "a" in entries, entries.get("a")) == (2, True, False, None)
    with pytest.raises(KeyError):
        entries["a"]


def test_a_restart_reads_only_what_its_database_does_not_have(bench: Bench) -> None:
    bench.start()
    bench.write(*(put(f"k{i}", i) for i in range(50)))
    bench.write(put("k1", 60), gone("k2", 60), confirmed=False)  # killed between the changelog and the database
    assert bench.start() == bench.whole().state()
    assert bench.read == 2
    bench.start()
    assert bench.read == 0


def test_a_partition_that_moved_away_and_back_has_what_its_other_owner_wrote(bench: Bench) -> None:
    bench.start()
    bench.write(put("a", 1), put("b", 1))
    bench.stop()
    bench.log += [put("a", 5, "other"), gone("b", 5), put("c", 6)]
    assert bench.start() == {"a": stamped(5, b"other"), "c": stamped(6, b"")}


def test_what_somebody_else_writes_in_between_is_read_after_the_next_start(bench: Bench) -> None:
    bench.start()
    bench.write(put("a", 1))
    bench.log.append(put("z", 9))
    bench.write(put("a", 2))
    assert bench.start() == bench.whole().state()
    assert bench.read == 2


def test_a_deletion_before_the_restart_still_beats_a_late_flush_after_it(bench: Bench) -> None:
    bench.start()
    bench.write(put("a", 5))
    bench.write(gone("a", 7))
    bench.log.append(put("a", 6))
    assert bench.start() == {}
    assert bench.lost == [gone("a", 7)], "it is written again, or compaction would leave the wrong one"
    assert bench.whole().overwritten() == bench.lost


def test_a_value_in_the_database_beats_a_late_flush_too(bench: Bench) -> None:
    bench.start()
    bench.write(put("a", 5))
    bench.log += [put("a", 3), gone("a", 4)]
    assert bench.start() == {"a": stamped(5, b"")}
    assert bench.lost == [put("a", 5)]


ENTRIES = st.builds(
    lambda key, offset, deleted: gone(key, offset) if deleted else put(key, offset, key),
    st.sampled_from("abc"),
    st.integers(0, 9),
    st.booleans(),
)


@settings(max_examples=8, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["flush", "killed", "other", "start"]), st.lists(ENTRIES, max_size=4))))
def test_whoever_writes_and_whenever_it_restarts_the_state_is_that_of_the_whole_changelog(
    steps: list[tuple[str, list[Entry]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    bench = Bench(tmp_path_factory.mktemp("disk"))
    try:
        bench.start()
        for what, entries in steps:
            # The owner itself writes no offset below what it knows.
            known = bench.whole()._best
            mine = [entry for entry in entries if entry.key not in known or entry.offset >= known[entry.key].offset]
            if what == "flush" and len({entry.key for entry in mine}) == len(mine):
                bench.write(*mine)
            elif what != "start":
                bench.log += entries
            if what in ("killed", "start"):
                assert bench.start() == bench.whole().state()
        assert bench.start() == bench.whole().state()
    finally:
        bench.stop()


def test_the_database_of_another_changelog_is_rebuilt(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.start()
    bench.write(put("a", 1))
    bench.identity = "cluster/app-state-changelog/created again"
    bench.log = [put("b", 1)]
    assert bench.start() == {"b": stamped(1, b"")}
    assert "is a copy of another changelog (cluster/app-state-changelog/id[0]; here it is" in caplog.text


def test_a_database_that_was_unused_for_too_long_is_rebuilt(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start()
    bench.write(put("a", 1))
    bench.stop()
    bench.log = []  # the deletion of `a` came and was compacted away
    later = time.time() + IDLE_MS / 1000 + 60
    monkeypatch.setattr("streams.runtime.rocksdb_store.time.time", lambda: later)
    os.utime(bench.folder / "worker" / "0", (later, later))
    assert bench.start() == {}
    assert "was last in use 12 hours ago" in caplog.text


def test_a_database_with_a_future_timestamp_is_rebuilt(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as ahead:
        later = time.time() + 30 * 24 * 3600
        ahead.setattr("streams.runtime.rocksdb_store.time.time", lambda: later)
        bench.start()
        bench.write(put("a", 1))
        bench.stop()
    bench.log = []
    assert bench.start() == {}
    assert "was last in use -720 hours ago" in caplog.text


def test_what_was_killed_while_it_made_or_removed_a_database_leaves_nothing_that_is_believed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.folder / "worker" / "0").mkdir(parents=True)  # killed before RocksDB wrote anything there
    bench.start()
    bench.write(put("a", 1))

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    bench.log = [put("b", 2)]
    with monkeypatch.context() as kill, pytest.raises(KeyboardInterrupt):
        kill.setattr("streams.runtime.rocksdb_store.shutil.rmtree", killed)
        bench.start(anew=True)
    assert bench.start() == {"b": stamped(2, b"")}
    assert [path.name for path in (bench.folder / "worker").iterdir() if path.is_dir()] == ["0"]


def test_what_workers_left_that_are_gone_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    stores = [DiskStore(tmp_path, name=name) for name in ("here", "there", "left")]
    for store in stores:
        store.open(0)
        store.open(1)
    stores[2].close()
    stores[0].drop(1)
    for folder in tmp_path.glob("*/*/"):
        os.utime(folder, (0, 0))
    later = DiskStore(tmp_path, name="new")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/")} == {
        "here/0", "here/1", "there/0", "there/1",
    }  # fmt: skip
    stores[0]._tidied = -1e9
    stores[0].apply(0, [])
    assert {path.name for path in (tmp_path / "here").glob("*/")} == {"0"}, "it was taken away long ago"
    for store in (*stores[:2], later):
        store.close()


def test_what_databases_hold_in_memory_is_counted_and_bounded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.open(0)
    before = store.memory()
    store.apply(0, [put(f"half/0/{at}", at, "x" * 1500) for at in range(2000)])
    assert before + 2000 * 1500 < store.memory() < CACHE_BYTES + BUFFERS_BYTES
    store.close()


@pytest.mark.parametrize("size", [100, 4000])
def test_what_was_deleted_leaves_the_files_in_time(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, not only for those who ask for the key: small values, and halves in files of their own."""
    monkeypatch.setattr("streams.runtime.rocksdb_store.REWRITTEN_S", 1)
    store = DiskStore(tmp_path)
    store.open(0)
    secret = os.urandom(16)

    def flush(*entries: Entry) -> None:
        store._tidied = -1e9
        store.apply(0, entries)

    def on_disk() -> bool:
        while True:
            files = sorted((tmp_path / "worker" / "0").iterdir())
            for path in files:
                with contextlib.suppress(FileNotFoundError):
                    if secret in path.read_bytes():
                        return True
            # RocksDB moves bytes to a new file and removes the old one, perhaps meanwhile.
            if sorted((tmp_path / "worker" / "0").iterdir()) == files:
                return False

    flush(Entry("half/0/1", stamped(1, secret + os.urandom(size)), 1), put("half/0/2", 2, "x" * size))
    assert on_disk()
    flush(gone("half/0/1", 3))
    deadline = time.monotonic() + 60
    while on_disk():
        assert time.monotonic() < deadline
        time.sleep(0.2)
        flush(put("clock/0", 4))
    assert dict(store.entries(0)).keys() == {"half/0/2", "clock/0"}
    store.close()


def test_without_room_it_says_so_and_goes_on_from_there_when_there_is_some(bench: Bench) -> None:
    bench.start()
    bench.write(put("a", 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(
            StateUnreadable, match=r"no space left for the state in .*worker/0: IO error: .*File too large"
        ):
            bench.write(put("b", 2, "x" * 2**21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bench.start() == bench.whole().state()
    assert bench.read == 1, "the copy was not thrown away"


def test_the_database_is_accessible_to_its_owner_alone(bench: Bench) -> None:
    bench.start()
    assert (bench.folder / "worker").stat().st_mode & 0o777 == 0o700


def test_a_path_with_lock_in_its_name_is_not_taken_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "BLOCKS"
    store = DiskStore(folder)
    store.open(0)
    store.close()
    (folder / "worker" / "0" / "CURRENT").write_text("MANIFEST-999999\n")
    store = DiskStore(folder)
    assert store.open(0).position == 0 and store.rebuilt == 1
    with pytest.raises(StoreLocked):
        store._database(folder / "worker" / "0")
    store.close()


def test_what_recovery_writes_again_is_known_by_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that took no notice of it would not go on, and the next restart read all that came after."""
    worker = _Worker(JoinProcessor(CODEC), StreamSettings("127.0.0.1:1", tmp_path, state="rocksdb"), {})
    right, late = put("clock/0", 5, "clocks.."), put("clock/0", 3, "clocks..")

    async def read_changelog(topic: str, folds: dict[int, DiskFold], *rest: object) -> None:
        folds[0].add(right)
        folds[0].add(late)
        folds[0].settle(2)

    class Sink:
        async def send(self, records: list[Produce]) -> int:
            assert [record.value for record in records] == [right.value]
            return 2

    monkeypatch.setattr("streams.runtime.worker.read_changelog", read_changelog)
    monkeypatch.setattr(worker, "_identity", lambda: "id")
    monkeypatch.setattr(worker, "_topics", TopicsUnchanged())
    monkeypatch.setattr(worker, "_sink", Sink())
    monkeypatch.setattr(worker, "_metrics", SimpleNamespace())
    worker._counts.progressed_at = 0.0
    asyncio.run(worker._restore([0]))
    assert worker._counts.progressed_at > 0, (
        "much state takes long to take over, and the watchdog is patient for so long"
    )
    assert isinstance(worker._store, DiskStore)
    assert worker._store.open(0).position == 3
    worker._store.close()


@pytest.mark.parametrize("what", ["CURRENT", "sst"])
def test_a_damaged_database_is_rebuilt(bench: Bench, what: str, caplog: pytest.LogCaptureFixture) -> None:
    bench.start()
    bench.write(*(put(f"key-{i}", i, "x" * 200) for i in range(2000)))
    assert bench.store is not None
    bench.store._open[0]._db.flush()
    bench.stop()
    folder = bench.folder / "worker" / "0"
    (path,) = [file for file in folder.iterdir() if file.name == what or file.suffix == f".{what}"]
    data = bytearray(path.read_bytes())
    data[10 : len(data) // 2 + 10] = bytes(len(data) // 2)
    path.write_bytes(data)
    try:
        state = bench.start()
    except StateUnreadable as error:
        assert "cannot be read" in str(error)
        state = bench.start()
    assert state == bench.whole().state()
    assert "rebuilt from the changelog" in caplog.text


class Log:
    """Takes what a worker sends; keeps its changelog."""

    def __init__(self) -> None:
        self.changelog: list[Entry] = []
        self.outputs: list[Produce] = []

    async def send(self, records: Sequence[Produce]) -> int:
        for each in records:
            if each.topic == CHANGELOG:
                self.changelog.append(entry_of(CHANGELOG, 0, 0, each.key, each.value, each.headers))
            else:
                self.outputs.append(each)
        return len(self.changelog) - 1


CHANGELOG = topics.changelog("tentalis-join", "state")


@pytest.mark.parametrize("damage", ["missing", "rubbish"])
def test_a_damaged_half_dead_letters_no_record_and_the_state_is_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    log, key = Log(), "half/3/0"

    def worker() -> tuple[DiskStore, BatchRunner]:
        processor = JoinProcessor(CODEC)
        store = DiskStore(tmp_path, processor.age)
        fold = store.open(PARTITION)
        for entry in log.changelog[fold.position :]:
            fold.add(entry)
        fold.settle(len(log.changelog))
        processor.restore(PARTITION, store.entries(PARTITION))
        limits = DeadLetterLimits(run=5)
        return store, BatchRunner(
            processor, log, store=store, changelog=CHANGELOG, limits=limits, record_limit=2**20, version="1"
        )

    store, runner = worker()
    asyncio.run(runner.run(PARTITION, [record_at(0, 0, score(sample(head("a"))))]))
    store.close()
    store, runner = worker()
    database = store._open[PARTITION]._db
    if damage == "missing":
        del database[b"\x01" + key.encode()]
    else:
        database[b"\x01" + key.encode()] = stamped(0, b"\xff rubbish")
    innocent = [record_at(1, 10 * DAY_MS, tick()), record_at(2, 10 * DAY_MS, tick())]
    with pytest.raises(DamagedState, match="half"):
        asyncio.run(runner.run(PARTITION, innocent))
    assert log.outputs == []
    store.close()
    store, runner = worker()
    assert "rebuilt from the changelog" in caplog.text and store.rebuilt == 1
    asyncio.run(runner.run(PARTITION, innocent))
    assert [each.topic for each in log.outputs] == [topics.ROLLOUTS, topics.OUTCOMES]
    store.close()


def test_two_processes_take_two_folders_and_a_successor_takes_its_predecessors(tmp_path: Path) -> None:
    def age(key: str, value: bytes) -> None:
        return None

    first, second = DiskStore(tmp_path, age, "join-0"), DiskStore(tmp_path, age, "join-0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["join-0", "join-0-1"]
    first.close()
    third = DiskStore(tmp_path, age, "join-0")
    assert len(list(tmp_path.iterdir())) == 2
    second.close()
    third.close()


def test_ages_are_found_in_order_and_from_where_one_wants(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, lambda key, value: int(value[8:]) if key.startswith("m/") else None)
    store.open(0)
    store.apply(0, [*(put(f"m/{age}", 0, str(age)) for age in (300, -5, 7)), put("x", 0, "1")])
    table = store.entries(0)
    assert isinstance(table, StateTable)
    assert list(table.aged(-(2**63))) == [(-5, "m/-5"), (7, "m/7"), (300, "m/300")]
    table.forget_ages(7)
    assert list(table.aged(-(2**70))) == [(7, "m/7"), (300, "m/300")]
    assert list(table.aged(8)) == [(300, "m/300")]
    assert list(table.scan("m/3")) == [("m/300", stamped(0, b"300"))]
    store.close()


def test_ages_are_forgotten_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_tasks, "FORGET_AT", 10)
    store = DiskStore(tmp_path, JoinProcessor(CODEC).age)
    store.open(0)
    table = store.entries(0)
    assert isinstance(table, StateTable)
    store.apply(0, [_closed(f"t{since:02}", since) for since in range(40)])
    forgotten: list[int] = []
    monkeypatch.setattr(Database, "forget_ages", lambda database, before: forgotten.append(before))
    remembered = closed_tasks.ClosedTasksOnDisk(table, 0)
    for batch in range(1, 36):
        assert list(remembered.expire(batch)) == [f"t{batch - 1:02}"]
        remembered.flushed()
    assert forgotten == [10, 20, 30]
    store.close()


def _closed(task_id: str, since: int) -> Entry:
    return Entry(TASK + task_id, encode_task(JoinState(0, Phase.CLOSED, since)), 0)


def test_a_start_looks_at_what_is_open_and_not_at_all_that_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that looked at every header would stand still for minutes where a day's tasks are remembered: longer than
    the watchdog has patience, so that it would never begin."""
    store = DiskStore(tmp_path, JoinProcessor(CODEC).age)
    store.open(0)
    store.apply(0, [_closed(f"t{since:04}", since) for since in range(2000)])
    store.apply(0, [_open("x"), _open("y"), Entry("clock/0", encode_clock(10, DAY_MS + 5), 10)])
    store.apply(0, [_closed("x", 2000), gone(f"{TASK}t0000", 1)])
    read: list[bytes] = []
    scan, value = Database.scan, Database.value

    def counted(database: Database, *args: Any, **kwargs: Any) -> Iterator[tuple[bytes, bytes]]:
        for key, found in scan(database, *args, **kwargs):
            read.append(key)
            yield key, found

    def counted_value(database: Database, raw: bytes) -> bytes | None:
        read.append(raw)
        return value(database, raw)

    monkeypatch.setattr(Database, "scan", counted)
    monkeypatch.setattr(Database, "value", counted_value)
    join = JoinProcessor(CODEC)
    join.restore(0, store.entries(0))
    # Four more are too old by the clock, and were not deleted before the worker went.
    assert (join.partitions[0].open_tasks, join.partitions[0].markers) == (1, 1996)
    assert len(read) < 30
    effects = asyncio.run(join.process(0, [LogRecord(topics.HALVES, 0, 11, DAY_MS + 5, "x", b"", (), False)]))
    assert {key for key, found in effects.changes[0] if found is None} == {f"{TASK}t000{n}" for n in range(1, 5)}
    store.close()


def _open(task_id: str) -> Entry:
    return Entry(
        TASK + task_id, encode_task(JoinState(0, Phase.OPEN, 0, 1, head=head(task_id), deadline=2 * DAY_MS)), 0
    )
