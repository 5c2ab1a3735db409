"""Partition queues: batches (`delivery.py`) of one partition run in order, different partitions concurrently."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from streams.runtime.exit_status import foreseen
from streams.runtime.processor import LogRecord

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""Seconds within which a cancelled partition queue must end. Together with the grace period this is well below the
rebalance timeout (30 s), after which the group evicts this worker."""


class QueueStuck(Exception):
    """A partition queue did not end after it was cancelled."""


@dataclass(slots=True)
class QueuedBatch:
    """A batch of a partition, or its due timeouts if `records` is empty. `finished(True)` is called after its effects
    are confirmed, `finished(False)` if it was abandoned."""

    records: Sequence[LogRecord]
    finished: Callable[[bool], None] = field(default=lambda done: None)

    @property
    def topic(self) -> str | None:
        """The topic of its records, which all have the same one."""
        return self.records[0].topic if self.records else None

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return sum(len(record.value) for record in self.records)


class PartitionQueues:
    """One queue per partition number: its batches run one after the other, different queues run concurrently.

    All batches that arrive while one runs are merged into the next: batches are small under low load, and grow with
    the load.

    Args:
        run: runs a batch.
        waiting: returns the partitions that can be cancelled immediately, because they only wait.
        fail: called when a batch fails; its queue stops.
        most_records, most_bytes: limits of batches merged into one.
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
        self._queues: dict[int, deque[QueuedBatch]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._broken: set[int] = set()

    def submit(self, partition: int, job: QueuedBatch) -> None:
        """Appends a batch to its partition's queue."""
        if partition in self._broken:
            job.finished(False)
            return
        self._queues.setdefault(partition, deque()).append(job)
        if partition not in self._tasks:
            self._tasks[partition] = asyncio.create_task(self._work_off(partition), name=f"queue-{partition}")

    def idle(self, partition: int) -> bool:
        """True if the partition's queue is empty, nothing of it runs, and it has not failed."""
        return partition not in self._tasks and partition not in self._broken

    async def quiesce(self, grace: float) -> None:
        """Abandons batches that have not begun or only wait, gives the others `grace` seconds to finish, then cancels
        them. A queue that still does not end fails the worker: the consumer group does not wait for it."""
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
            log.warning(
                "%s did not finish within %g s: abandoned, its records are delivered again", task.get_name(), grace
            )
            task.cancel()
        _, stuck = await asyncio.wait(running.values(), timeout=CANCEL_S)
        if stuck:
            # Their work belongs to an assignment that is over: nothing may run after them in the same queue.
            self._broken |= {partition for partition, task in running.items() if task in stuck}
            names = ", ".join(sorted(task.get_name() for task in stuck))
            self._fail(QueueStuck(f"{names} did not end within {CANCEL_S:g} s of being cancelled"))

    def _next(self, queue: deque[QueuedBatch]) -> list[QueuedBatch]:
        """Takes the oldest batch of a queue, and later ones of the same topic that fit into one batch with it.

        A queue mixes topics, so merging only neighbours would keep batches small. Records of different topics have no
        order among each other."""
        topic, count, size = queue[0].topic, 0, 0
        jobs: list[QueuedBatch] = []
        left: list[QueuedBatch] = []
        full = False
        for job in queue:
            if job.topic == topic and not full:
                count, size = count + len(job.records), size + job.size
                full = bool(jobs) and (count > self._most_records or size > self._most_bytes)
            (left if full or job.topic != topic else jobs).append(job)
        queue.clear()
        queue.extend(left)
        return jobs

    async def _work_off(self, partition: int) -> None:
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
            # No later batch may run, or its offset would be committed past the failed batch.
            self._broken.add(partition)
            where = not foreseen(error)
            log.error("partition %d: a batch could not be completed: %r", partition, error, exc_info=where)
            self._fail(error)
        finally:
            # Also for a cancelled queue: batches that arrived meanwhile belong to an assignment that is over. Run
            # before the records of the next assignment, they would make those look already applied.
            while queue:
                queue.popleft().finished(False)
            self._tasks.pop(partition, None)
