"""State on disk: which databases are believed, what a restart reads of the changelog, and which record wins."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.delivery import Store
from streams.disk import IDLE_MS, DiskStore
from streams.processor import StateUnreadable, Table, stamped
from streams.state import Entry, Fold, StateStore


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
            self.store.apply(0, [entries], [len(self.log) - 1])

    def stop(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None

    def whole(self) -> Fold:
        """The changelog, read from the beginning."""
        fold = Fold()
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
    store.apply(0, [[put("a", 1), put("\udcff", 1)], [put("b", 2), gone("a", 2)]], [1, 3])
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


def test_the_database_of_another_changelog_is_made_anew(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.start()
    bench.write(put("a", 1))
    bench.identity = "cluster/app-state-changelog/created again"
    bench.log = [put("b", 1)]
    assert bench.start() == {"b": stamped(1, b"")}
    assert "is a copy of another changelog (cluster/app-state-changelog/id[0]; here it is" in caplog.text


def test_a_database_that_was_away_for_too_long_is_made_anew(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start()
    bench.write(put("a", 1))
    bench.stop()
    bench.log = []  # the deletion of `a` came and was compacted away
    later = time.time() + IDLE_MS / 1000 + 60
    monkeypatch.setattr("streams.disk.time.time", lambda: later)
    for file in (bench.folder / "worker" / "0").iterdir():
        os.utime(file, (later, later))
    assert bench.start() == {}
    assert "was last in use 12 hours ago" in caplog.text


@pytest.mark.parametrize("what", ["CURRENT", "sst"])
def test_a_damaged_database_is_made_anew(bench: Bench, what: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "made anew from the changelog" in caplog.text


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
    store.apply(0, [[put(f"m/{age}", 0, str(age)) for age in (300, -5, 7)], [put("x", 0, "1")]], [])
    table = store.entries(0)
    assert isinstance(table, Table)
    assert list(table.aged(-(2**63))) == [(-5, "m/-5"), (7, "m/7"), (300, "m/300")]
    table.forget_ages(7)
    assert list(table.aged(-(2**70))) == [(7, "m/7"), (300, "m/300")]
    assert list(table.aged(8)) == [(300, "m/300")]
    assert list(table.scan("m/3")) == [("m/300", stamped(0, b"300"))]
    store.close()
