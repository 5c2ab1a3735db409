"""A worker that takes much state over makes progress all the while: the watchdog must not end it for that."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streams.apps.join import core
from streams.apps.join.half_cache import HalfCache
from streams.apps.join.processor import JoinProcessor
from streams.runtime.processor import StateTable
from streams.runtime.state import Reading
from streams.runtime.worker import StreamSettings, _Worker
from tests.support.join_support import CODEC, LIMITS, PARTITION, Partitioned, head, log_of, sample, score
from tests.support.topics_unchanged import TopicsUnchanged

OPEN = 20
"""Tasks, each with a half."""


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
def test_every_open_task_that_is_taken_over_is_progress(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Partitioned(log_of(*((number, score(sample(head(f"t{number}")))) for number in range(OPEN))))
    log.run()
    worker = _Worker(JoinProcessor(CODEC, LIMITS), StreamSettings("127.0.0.1:1", tmp_path, state=state), {})
    counts, processor = worker._counts, worker._processor
    progress, taken = list[bool](), list[Mapping[str, bytes]]()
    restore = processor.restore

    async def read_changelog(topic: str, readings: Mapping[int, Reading], *rest: object) -> None:
        for entry in log.changelog:
            readings[PARTITION].add(entry)
        readings[PARTITION].settle(len(log.changelog))

    def took(partition: int, entries: Mapping[str, bytes]) -> None:
        taken.append(entries)
        restore(partition, entries)

    def looked_at(step: Callable[..., Any]) -> Callable[..., Any]:
        """As if the watchdog looked after every step."""

        def stepped(*arguments: Any) -> Any:
            found = step(*arguments)
            progress.append(counts.progressed_at > 0)
            counts.progressed_at = 0.0
            return found

        return stepped

    monkeypatch.setattr("streams.runtime.worker.read_changelog", read_changelog)
    monkeypatch.setattr(worker, "_identity", lambda: "id")
    monkeypatch.setattr(worker, "_topics", TopicsUnchanged())
    monkeypatch.setattr(worker, "_metrics", SimpleNamespace())
    monkeypatch.setattr(processor, "restore", took)
    monkeypatch.setattr(core, "decode_task", looked_at(core.decode_task))
    monkeypatch.setattr(HalfCache, "value", looked_at(HalfCache.value))
    asyncio.run(worker._restore([PARTITION]))
    # On disk, every half is read besides.
    assert progress == [True] * OPEN * (2 if isinstance(taken[0], StateTable) else 1)

    counts.progressed_at = 0.0
    assert len(dict(taken[0])) == 2 * OPEN + 1
    assert counts.progressed_at == 0.0, "what is read there later is no sign that anything gets on"
    worker._store.close()
