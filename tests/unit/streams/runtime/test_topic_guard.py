"""The runtime's own records on a changelog: no state, kept across restarts; a fence voids what is before it. Topics
that are looked at again."""

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from streams.runtime.processor import stamped
from streams.runtime.rocksdb_store import DiskStore
from streams.runtime.state import ChangelogFold, Entry, StateStore
from streams.runtime.topic_guard import ChangelogReading, TopicGuard, fence_entry, sources_entry
from tentalis.kafka.identity import TopicIdentity, TopicLost
from tentalis.kafka.topic_client import TopicClient
from tentalis.service.settings import Settings

BEFORE = [Entry("a", stamped(90, b"old"), 90), Entry("b", stamped(91, b"old"), 91), Entry("c", None, 92)]
AFTER = [Entry("a", stamped(-1, b"kept"), -1), Entry("c", stamped(3, b"new"), 3)]


def read(store: StateStore | DiskStore, log: list[Entry], batch: int) -> tuple[ChangelogReading, dict[str, bytes]]:
    fold = store.open(0)
    reading = ChangelogReading(fold)
    for at in range(reading.position, len(log), batch):
        for entry in log[at : at + batch]:
            reading.add(entry)
        reading.settle(min(at + batch, len(log)))
    return reading, fold.state() if isinstance(fold, ChangelogFold) else dict(store.entries(0))


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_after_a_fence_the_offsets_begin_anew(tmp_path: Path, state: str, batch: int) -> None:
    """Else the value at offset 90 of the lost topic would win over each value of the new one."""
    store = StateStore() if state == "memory" else DiskStore(tmp_path)
    log = [sources_entry({"in": "1"}), *BEFORE, fence_entry("lost"), *AFTER, sources_entry({"in": "2"})]
    reading, found = read(store, log, batch)
    assert found == {"a": stamped(-1, b"kept"), "c": stamped(3, b"new")}
    assert (reading.sources, reading.applied) == ({"in": "2"}, 3)
    store.close()


def test_a_database_that_resumes_knows_its_inputs(tmp_path: Path) -> None:
    """A start that is refused must not make the next one forget the loss."""
    log = [sources_entry({"in": "1"}), *BEFORE]
    for _ in range(2):
        store = DiskStore(tmp_path)
        reading, found = read(store, log, 100)
        assert reading.sources == {"in": "1"}
        assert found.keys() == {"a", "b"}
        store.close()
    store = DiskStore(tmp_path)
    reading, _ = read(store, log, 100)
    assert reading.position == len(log)
    entry = sources_entry({"in": "1", "further": "7"})
    assert entry.value is not None
    store.wrote_sources(0, entry.value, len(log))
    store.close()
    reading, _ = read(DiskStore(tmp_path), [*log, entry], 100)
    assert (reading.position, reading.sources) == (len(log) + 1, {"in": "1", "further": "7"})


def test_a_topic_that_is_made_again_between_two_looks_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment may come between the deletion and the moment at which the topics are compared."""
    there = {"in": TopicIdentity("1", 2), "out": TopicIdentity("2", 2)}

    def identities(_: TopicClient, names: Collection[str]) -> dict[str, TopicIdentity]:
        return {name: there[name] for name in names if name in there}

    monkeypatch.setattr(TopicClient, "identities", identities)
    settings = Settings(bootstrap="127.0.0.1:1")
    guard = TopicGuard(settings, "app", ["in"], None, lambda _: pytest.fail("asked"), ["out"])

    async def looks() -> None:
        await guard.look({"in": 2})
        there["in"] = TopicIdentity("3", 2)
        for look in (guard.look({"in": 2}), guard.check_running()):
            with pytest.raises(TopicLost, match="its id was 1 and is 3"):
                await look

    asyncio.run(looks())
