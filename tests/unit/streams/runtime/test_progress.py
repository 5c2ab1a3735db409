"""The watchdog ends a worker if one partition makes no progress, whatever the others do."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from faust.types import TP

from streams.runtime.delivery import DeliveryCounts
from streams.runtime.health import Watchdog
from streams.runtime.processor import Effects, LogRecord, OutputRecord, Retryable
from streams.runtime.progress import Place, StallDetector
from streams.runtime.queues import QueuedBatch
from streams.runtime.worker import StreamSettings, _Worker
from tentalis.service.exit_codes import ExitCode

LIMIT_S = 120.0


class Script:
    """A processor that is told per partition to work, to hang, to find the outside away or to ask it."""

    app_id = "app"
    topics = ("in",)
    table: str | None = None

    def __init__(self, does: Mapping[int, str]) -> None:
        self.does = does
        self.steps = 0
        self.beats = 0

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None: ...

    def revoke(self, partition: int) -> None: ...

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        if self.does[partition] == "away":
            raise Retryable("away")
        if self.does[partition] != "works":
            await asyncio.Event().wait()
        return Effects()

    def asking(self, partition: int) -> bool:
        return self.does[partition] == "asks"

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        self.beats += 1
        return ()


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("streams.runtime.worker.time", clock)
    monkeypatch.setattr("streams.runtime.delivery.time", clock)
    monkeypatch.setattr("streams.runtime.worker.BEAT_S", 0.001)
    return clock


def stands_for(clock: Clock, folder: Path, does: Mapping[int, str]) -> tuple[float, TP | None]:
    """For how many seconds a worker stands still whose partitions all lag, after a while longer than the limit; and
    which."""
    script = Script(does)
    worker = _Worker(script, StreamSettings("127.0.0.1:1", folder, stall_limit=LIMIT_S), {"in": 4})
    worker._runner._letters = None  # there is no broker with dead letters
    places = {TP("in", partition) for partition in does}
    worker._app = SimpleNamespace(
        consumer=SimpleNamespace(lag=lambda *_: dict.fromkeys(places, 5), taken=lambda: places)
    )
    worker._metrics = SimpleNamespace(recovery_seconds=0.0)

    async def scenario() -> None:
        worker.delivering(sorted(does))
        beating = asyncio.create_task(worker._beat())
        for offset in range(50):
            for partition in does:
                worker._queues.submit(partition, QueuedBatch([LogRecord("in", partition, offset, 0, "k", b"v")]))
            script.steps += 1
            beats = script.beats
            while script.beats < beats + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            clock.now += 4.0
        beating.cancel()
        await worker._queues.quiesce(0.0)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    standing = worker._counts.standing
    return clock.now - worker._counts.progressed_at, None if standing is None else TP(*standing)


@pytest.mark.parametrize("neighbour", ["works", "away", "asks"])
def test_a_queue_that_hangs_is_seen_whatever_its_neighbour_does(clock: Clock, tmp_path: Path, neighbour: str) -> None:
    assert stands_for(clock, tmp_path, {2: neighbour, 3: "hangs"}) == (200.0, TP("in", 3))


@pytest.mark.parametrize("does", ["works", "away", "asks"])
def test_a_partition_that_works_or_waits_for_a_service_is_not_stalled(clock: Clock, tmp_path: Path, does: str) -> None:
    stood, _ = stands_for(clock, tmp_path, {2: does, 3: "works"})
    assert stood == 4.0, "since the last look"


def look(progress: StallDetector, now: float, lag: Mapping[Place, int], **said: object) -> tuple[float, Place | None]:
    known: dict[str, object] = {"taken": (), "excused": (), "finished": {}}
    return progress.look(now, lag, **known | said)  # type: ignore[arg-type]


A3, B3 = ("a", 3), ("b", 3)


def test_progress_of_a_queue_does_not_excuse_a_topic_that_the_fetcher_forgot() -> None:
    progress = StallDetector()
    assert look(progress, 0.0, {A3: 5, B3: 5}) == (0.0, A3)
    other = {"taken": {A3}, "finished": {A3: 2.0}}
    assert look(progress, 3.0, {A3: 5, B3: 5}, **other) == (0.0, B3)
    # Once its records are in the queue, they have their turn behind the other's.
    assert look(progress, 4.0, {A3: 5, B3: 5}, **other | {"taken": {A3, B3}}) == (2.0, A3)
    # What is fetched and done between two looks counts too.
    assert look(progress, 7.0, {A3: 0, B3: 5}, finished={A3: 2.0, B3: 6.0}) == (6.0, B3)


def test_standing_still_begins_when_there_is_something_to_do() -> None:
    progress = StallDetector()
    assert look(progress, 0.0, {A3: 0}) == (0.0, None)
    assert look(progress, 1.0, {A3: 1}) == (1.0, A3)
    assert look(progress, 2.0, {A3: 1}) == (1.0, A3)
    assert look(progress, 3.0, {A3: 1}, excused={3}) == (3.0, None)
    assert look(progress, 4.0, {A3: 1}, excused={2}) == (4.0, A3)
    progress.begin()
    assert look(progress, 5.0, {A3: 1}) == (5.0, A3)


def test_no_partition_is_stalled_while_the_event_loop_is_blocked() -> None:
    """By a partition whose state is taken over, which is progress: the others could not get on."""
    progress = StallDetector()
    assert look(progress, 0.0, {A3: 1}) == (0.0, A3)
    assert look(progress, 2.0, {A3: 1}) == (0.0, A3)
    assert look(progress, 502.0, {A3: 1}) == (495.0, A3)


def test_the_watchdog_names_what_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    counts, ended = DeliveryCounts(), list[int]()
    watchdog = Watchdog("tentalis-join", counts, 0.2, ended.append)
    watchdog.start()
    counts.progressed_at, counts.standing = time.monotonic() - 1000, ("halves", 3)
    with caplog.at_level(logging.CRITICAL):
        watchdog._thread.join(60)
    assert ended == [ExitCode.ERROR]
    assert "tentalis-join has made no progress for 1000 s although there is something to do on halves[3]" in caplog.text
