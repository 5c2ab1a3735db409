"""A worker while its partitions are revoked and others are assigned."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streams.runtime.faust.delivery import Batch
from streams.runtime.processor import Effects, LogRecord, OutputRecord
from streams.runtime.worker import StreamSettings, _Worker
from tests.support.topics_unchanged import TopicsUnchanged

PARTITION = 3


class Script:
    """A processor that always has something to do, and says what it was told."""

    app_id = "app"
    topics: tuple[str, ...] = ("in",)
    table: str | None = "state"

    def __init__(self) -> None:
        self.told: list[str] = []

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        self.told.append("restore")

    def revoke(self, partition: int) -> None:
        self.told.append("revoke")

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        self.told.append("process")
        return Effects()

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        self.told.append("due")
        return True

    async def expire(self, partition: int) -> Effects:
        self.told.append("expire")
        return Effects()

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        return ()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Worker:
    made = _Worker(Script(), StreamSettings("127.0.0.1:1", tmp_path), {"in": 4})
    made._app = SimpleNamespace(consumer=SimpleNamespace(lag=lambda *_: {}, taken=set))
    made._metrics = SimpleNamespace(recovery_seconds=0.0)
    monkeypatch.setattr(made, "_topics", TopicsUnchanged())
    monkeypatch.setattr("streams.runtime.worker.BEAT_S", 0.0)
    return made


def event(batch: Batch, acknowledged: list[bool]) -> Any:
    return SimpleNamespace(
        value=batch, message=SimpleNamespace(partition=PARTITION), ack=lambda: acknowledged.append(batch.done)
    )


def test_nothing_begins_while_partitions_are_given_up(worker: _Worker) -> None:
    """Nobody would wait for it, and a batch that was given up half-way has left its state behind."""
    script, acknowledged = worker._processor, list[bool]()
    assert isinstance(script, Script)

    async def turns() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def main() -> None:
        worker.delivering([PARTITION])
        beating = asyncio.create_task(worker._beat())
        await turns()
        assert "expire" in script.told
        await worker.quiesce()
        script.told.clear()
        worker._submit(event(Batch([LogRecord("in", PARTITION, 0, 0, "k", b"v")], 1, 1), acknowledged))
        await turns()
        beating.cancel()

    asyncio.run(main())
    assert (script.told, acknowledged) == ([], [False])


def test_the_changelog_is_read_when_nothing_of_this_worker_is_on_its_way(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its own records would look like somebody else's, and each rebalance of a slow cluster would end it."""
    script = worker._processor
    assert isinstance(script, Script)

    async def settled() -> None:
        script.told.append("settled")

    async def read_changelog(*rest: object) -> None:
        script.told.append("read")

    monkeypatch.setattr(worker._sink, "settled", settled)
    monkeypatch.setattr("streams.runtime.worker.read_changelog", read_changelog)
    asyncio.run(worker.recover([PARTITION]))
    assert script.told == ["settled", "read", "restore"]


def test_a_worker_that_ends_takes_the_state_of_no_batch_away(worker: _Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebalance while it stops, as where many workers are stopped together: a batch that is at work would fail for
    want of it, be tried one by one on none, and write that."""
    script = worker._processor
    assert isinstance(script, Script)

    async def read_changelog(*rest: object) -> None:
        """There is none."""

    monkeypatch.setattr("streams.runtime.worker.read_changelog", read_changelog)
    asyncio.run(worker.recover([PARTITION]))
    worker.delivering([PARTITION])
    worker.failed(RuntimeError("it ends"))
    worker.revoked()
    assert script.told == ["restore"]
    worker.delivering([PARTITION])
    assert worker._not_ready() is not None
