"""The lanes in which the batches of partitions run (`streams.delivery`): in order within one, beside each other."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from streams.ending import foreseen
from streams.processor import LogRecord

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""How long a lane may take to end when it is cancelled: with the grace period well below the rebalance timeout (30 s),
after which the group would throw this worker out."""


class LaneStuck(Exception):
    """A lane that took no notice of being cancelled."""


@dataclass(slots=True)
class Job:
    """A batch of a lane, or without records what is due there. `finished(True)` after its effects are confirmed,
    `finished(False)` if it was given up."""

    records: Sequence[LogRecord]
    finished: Callable[[bool], None] = field(default=lambda done: None)

    @property
    def topic(self) -> str | None:
        """The one topic of its records."""
        return self.records[0].topic if self.records else None

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return sum(len(record.value) for record in self.records)


class Lanes:
    """Per partition number one lane: its batches one after the other in order, lanes beside each other.

    What came while a batch was carried out is the next one, all of it: so batches are small while there is little to
    do, and grow with the load.

    Args:
        run: carries out a batch.
        waiting: lanes in which nothing but a wait would be interrupted.
        fail: called when a batch fails; its lane stands still from then on.
        most_records, most_bytes: of waiting batches that are run as one.
    """

    def __init__(
        self,
        run: Callable[[int, Sequence[LogRecord]], Awaitable[None]],
        waiting: Callable[[], set[int]],
        fail: Callable[[Exception], None],
        most_records: int = 1,
        most_bytes: int = 0,
    ) -> None:
        self._run = run
        self._waiting = waiting
        self._fail = fail
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._queues: dict[int, deque[Job]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._broken: set[int] = set()

    def submit(self, partition: int, job: Job) -> None:
        """Adds a batch to the end of its lane."""
        if partition in self._broken:
            job.finished(False)
            return
        self._queues.setdefault(partition, deque()).append(job)
        if partition not in self._tasks:
            self._tasks[partition] = asyncio.create_task(self._lane(partition), name=f"lane-{partition}")

    def idle(self, partition: int) -> bool:
        """Whether a lane has nothing to do."""
        return partition not in self._tasks and partition not in self._broken

    async def quiesce(self, grace: float) -> None:
        """Gives up what has not begun and what only waits, lets the rest finish for `grace` seconds, then cancels
        it. A lane that does not end even then fails: the group does not wait for it."""
        for queue in self._queues.values():
            while queue:
                queue.popleft().finished(False)
        running = dict(self._tasks)
        for partition in self._waiting() & running.keys():
            running[partition].cancel()
        if not running:
            return
        _, late = await asyncio.wait(running.values(), timeout=grace)
        for task in late:
            log.warning("%s did not finish within %g s: given up, its records will come again", task.get_name(), grace)
            task.cancel()
        _, stuck = await asyncio.wait(running.values(), timeout=CANCEL_S)
        if stuck:
            # Whatever they still do belongs to an assignment that is over: nothing may run behind them.
            self._broken |= {partition for partition, task in running.items() if task in stuck}
            names = ", ".join(sorted(task.get_name() for task in stuck))
            self._fail(LaneStuck(f"{names} did not end within {CANCEL_S:g} s of being cancelled"))

    def _next(self, queue: deque[Job]) -> list[Job]:
        """The oldest batch of a lane, and those behind it of the same topic that fit into one with it. Topics take
        turns in a lane, so batches would stay small behind any other topic's; among each other they have no order."""
        topic, count, size = queue[0].topic, 0, 0
        jobs: list[Job] = []
        left: list[Job] = []
        full = False
        for job in queue:
            if job.topic == topic and not full:
                count, size = count + len(job.records), size + job.size
                full = bool(jobs) and (count > self._most_records or size > self._most_bytes)
            (left if full or job.topic != topic else jobs).append(job)
        queue.clear()
        queue.extend(left)
        return jobs

    async def _lane(self, partition: int) -> None:
        queue = self._queues[partition]
        try:
            while queue:
                jobs = self._next(queue)
                done = False
                try:
                    await self._run(partition, [record for job in jobs for record in job.records])
                    done = True
                finally:
                    for job in jobs:
                        job.finished(done)
        except Exception as error:
            # Nothing after the failed batch may run, or its offset would be committed past it.
            self._broken.add(partition)
            where = not foreseen(error)
            log.error("partition %d: a batch could not be completed: %r", partition, error, exc_info=where)
            self._fail(error)
        finally:
            # Also of a lane that was cancelled: what came to it meanwhile belongs to an assignment that is over, and
            # before the records of the next one would make those look as if they had been applied.
            while queue:
                queue.popleft().finished(False)
            self._tasks.pop(partition, None)
