"""The bound on what is open: which partitions are read on, what a worker says, and that nothing is evicted."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from streams.apps.join.half_cache import HOT_BYTES, HalfCache
from streams.apps.join.processor import JoinProcessor
from streams.apps.join.state import Payload
from streams.fold.admission_control import AdmissionStage, OpenBound, PartitionLoad
from streams.runtime.delivery import BatchRunner
from streams.runtime.dlq import Produce
from streams.runtime.processor import TURN, LogRecord
from streams.runtime.rocksdb_store import DiskTable
from streams.runtime.state import StateStore
from tentalis.dlq.limits import DeadLetterLimits
from tests.support.join_support import (
    CODEC,
    LIMITS,
    PARTITION,
    drive,
    head,
    hint,
    open_,
    record_at,
    sample,
    score,
    tick,
)

LOADS = st.dictionaries(
    st.integers(0, 7),
    st.builds(PartitionLoad, st.integers(0, 20), st.integers(0, 2000), st.integers(0, 100)),
    min_size=1,
)


@given(LOADS, st.integers(1, 60), st.integers(1, 6000))
def test_below_the_bound_at_least_one_partition_is_read_and_at_it_none(
    loads: dict[int, PartitionLoad], tasks: int, size: int
) -> None:
    bound = OpenBound(tasks, size)
    going = [partition for partition in loads if not bound.waits(loads, partition)]
    over = sum(load.tasks for load in loads.values()) >= tasks or sum(load.bytes for load in loads.values()) >= size
    assert bool(going) is not over
    match bound.stage(loads):
        case AdmissionStage.FREE:
            assert going == list(loads)
        case AdmissionStage.TURNS:
            assert len(going) == 1
            assert loads[going[0]].time == min(load.time for load in loads.values())


def test_without_a_bound_no_partition_waits() -> None:
    assert not OpenBound().waits({0: PartitionLoad(10**9, 10**15, 0)}, 0)


class Sink:
    def __init__(self) -> None:
        self.ends: Counter[tuple[str, int | None]] = Counter()

    async def send(self, records: Sequence[Produce]) -> int:
        self.ends.update((record.topic, record.partition) for record in records)
        return self.ends[records[-1].topic, records[-1].partition] - 1


def join(bound: OpenBound) -> JoinProcessor:
    made = JoinProcessor(CODEC, LIMITS, bound=bound)
    for partition in (PARTITION, PARTITION + 1):
        made.restore(partition, {})
    return made


def on(partition: int, record: LogRecord) -> LogRecord:
    return record._replace(partition=partition)


def test_it_counts_the_bytes_that_wait_as_they_lie_on_the_log() -> None:
    made = join(OpenBound(bytes=1))
    task = head("a", n=2)
    first, second = record_at(0, 0, score(sample(task, 0))), record_at(1, 0, score(sample(task, 1)))
    drive(made.process(PARTITION, [first, second]))
    waiting = len(first.value) + len(second.value)
    assert made.partitions[PARTITION].open_bytes == waiting
    assert made.waits(PARTITION) and f"{waiting:,} bytes are open, the bound is 1 bytes" in str(made.full())
    drive(made.process(PARTITION, [record_at(2, 2000, tick())]))
    assert made.partitions[PARTITION].open_bytes == 0 and not made.waits(PARTITION) and made.full() is None


def test_on_disk_as_few_small_halves_stay_decoded_as_large_ones() -> None:
    """A hint of some hundred bytes is ten times as large in memory: 30,000 of them are not 8 MiB."""
    kept, record = HalfCache(DiskTable(None), str), hint(sample(head("a")))  # type: ignore[arg-type]
    payloads = [Payload(offset, record) for offset in range(30_000)]
    for payload in payloads:
        kept.add(payload, 300)
    kept.flushed()
    kept.flushed()
    assert sum(payload.record is not None for payload in payloads) <= HOT_BYTES / 3000


def test_a_partition_waits_until_another_has_made_room(caplog: pytest.LogCaptureFixture) -> None:
    """Four tasks are open in one partition. The other waits, as its clock is ahead, until their deadline has passed."""
    caplog.set_level(logging.WARNING)
    made = join(OpenBound(tasks=5))
    behind, ahead = PARTITION, PARTITION + 1

    async def main() -> None:
        runner = BatchRunner(
            made, Sink(), store=StateStore(), changelog="c", limits=DeadLetterLimits(), record_limit=10**6, version="1"
        )
        await runner.run(ahead, [on(ahead, record_at(0, 500, tick()))])
        await runner.run(behind, [record_at(i, 0, open_(head(f"t{i}"))) for i in range(4)])
        waiting = asyncio.create_task(runner.run(ahead, [on(ahead, record_at(1, 500, open_(head("u"))))]))
        await asyncio.sleep(0)
        assert runner.waiting == {ahead} and not made.waits(behind)
        await runner.run(behind, [record_at(4, 400, tick())])
        assert not waiting.done()
        await runner.run(behind, [record_at(5, 2000, tick())])
        await asyncio.wait_for(waiting, 5)
        assert runner.waiting == set()
        assert (made.partitions[behind].open_tasks, made.partitions[ahead].open_tasks) == (0, 1)

    asyncio.run(main())
    assert "4 tasks with 0 bytes are open, the bound is 5 tasks: partitions are read one at a time" in caplog.text


def test_at_the_bound_everything_waits_and_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    made = join(OpenBound(tasks=2))
    drive(made.process(PARTITION, [record_at(i, 0, open_(head(f"t{i}"))) for i in range(2)]))
    assert made.waits(PARTITION) and made.waits(PARTITION + 1)
    assert "raise --max-open-tasks" in caplog.text and "start another worker" in caplog.text
    assert made.partitions[PARTITION].open_tasks == 2, "nothing is evicted"
    made.revoke(PARTITION)
    assert made.full() is None and not made.waits(PARTITION + 1), "another worker has the partition now"


def test_a_long_batch_leaves_turns_to_others() -> None:
    fold = JoinProcessor(CODEC)
    fold.restore(PARTITION, {})
    (tick,) = fold.ticks([PARTITION])
    records = [LogRecord(topics.HALVES, PARTITION, i, 1, tick.key, tick.value) for i in range(10 * TURN)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        beside = asyncio.create_task(others())
        effects = await fold.process(PARTITION, records)
        beside.cancel()
        assert not effects.dead and effects.changes

    asyncio.run(both())
    assert turns >= 10
