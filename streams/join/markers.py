"""The tasks that are remembered but not open, encoded: there are many, and few are touched again.

With the state in memory all of them are there; with the state on disk only those that the batch at hand has written,
the rest is looked up. So what such a worker has in memory is bounded by open tasks, however many closed in a day."""

import heapq
from collections.abc import Iterator
from typing import Protocol

from streams.join.state import TASK, Phase, phase_and_since
from streams.processor import Table

NEVER = 2**63
FORGET_AT = 10_000
"""Expired markers whose ages are taken out of the table's index at once. One by one, each would be a range of its own
in RocksDB's buffer, all from the same key on; every read after a write sorts those anew, in time and bytes that grow
with the square of their number."""


class Markers(Protocol):
    """Values of tasks by id, each with the stream time since which it is remembered (ms)."""

    oldest: int
    """None of them is older than this; NEVER if there are none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...

    def get(self, task_id: str) -> bytes | None:
        """The value of a task, None if it is not remembered."""

    def put(self, task_id: str, since: int, value: bytes) -> None:
        """Remembers a task, or something else of it."""

    def remove(self, task_id: str) -> None:
        """The task is open again."""

    def expire(self, before: int) -> Iterator[str]:
        """Forgets what is older than `before`; which tasks that were."""

    def flushed(self) -> None:
        """What was put so far will be in the table before the next call."""


class InMemory:
    """Markers in a dict, with a heap of (since, task_id). An entry whose time is not the task's is passed over."""

    def __init__(self) -> None:
        self.oldest = NEVER
        self._values: dict[str, bytes] = {}
        self._queue: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, task_id: str) -> bytes | None:
        return self._values.get(task_id)

    def put(self, task_id: str, since: int, value: bytes) -> None:
        if task_id not in self._values:
            heapq.heappush(self._queue, (since, task_id))
            self.oldest = self._queue[0][0]
        self._values[task_id] = value

    def remove(self, task_id: str) -> None:
        self._values.pop(task_id, None)

    def expire(self, before: int) -> Iterator[str]:
        while self._queue and self._queue[0][0] < before:
            since, task_id = heapq.heappop(self._queue)
            value = self._values.get(task_id)
            if value is not None and phase_and_since(value)[1] == since:
                del self._values[task_id]
                yield task_id
        self.oldest = self._queue[0][0] if self._queue else NEVER

    def flushed(self) -> None:
        """Nothing changes."""


class OnDisk:
    """Markers in a table; in memory what was put since the last batch, and how many there are.

    Stream time never falls and a marker is put at its time, so whatever comes is younger than whatever was passed.

    Args:
        before: what is older is not remembered.
    """

    def __init__(self, table: Table, before: int) -> None:
        self.oldest = NEVER
        self._table, self._passed = table, before
        self._fresh = InMemory()
        self._opened: set[str] = set()
        self._flushed = False
        self._stale = 0
        self._count = table.count_aged()

    def left(self) -> Iterator[str]:
        """What was too old to be remembered when this began, but lies there still. Called once, before all else."""
        before, self._passed = self._passed, -NEVER
        return self.expire(before)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        for key in self._table.names(TASK):
            if self.get(key[len(TASK) :]) is not None:
                yield key[len(TASK) :]

    def get(self, task_id: str) -> bytes | None:
        self._settle()
        value = self._fresh.get(task_id)
        if value is not None or task_id in self._opened:
            return value
        value = self._table.get(TASK + task_id)
        if value is None:
            return None
        phase, since = phase_and_since(value)
        return None if phase is Phase.OPEN or since < self._passed else value

    def put(self, task_id: str, since: int, value: bytes) -> None:
        if self.get(task_id) is None:
            self._count += 1
        self._fresh.put(task_id, since, value)
        self.oldest = min(self.oldest, since)

    def remove(self, task_id: str) -> None:
        if self.get(task_id) is not None:
            self._count -= 1
        self._fresh.remove(task_id)
        self._opened.add(task_id)

    def expire(self, before: int) -> Iterator[str]:
        self._settle()
        self.oldest = NEVER
        gone: dict[str, None] = {}
        for since, key in self._table.aged(self._passed):
            if since >= before:
                self.oldest = since
                break
            task_id = key[len(TASK) :]
            value = self.get(task_id)
            if value is not None and phase_and_since(value)[1] == since:
                gone[task_id] = None
        gone |= dict.fromkeys(self._fresh.expire(before))
        self.oldest = min(self.oldest, self._fresh.oldest)
        self._passed = before
        self._stale += len(gone)
        self._count -= len(gone)
        yield from gone

    def flushed(self) -> None:
        self._flushed = True

    def _settle(self) -> None:
        if self._flushed:
            self._flushed = False
            self._fresh, self._opened = InMemory(), set()
            if self._stale >= FORGET_AT:
                # Not before: after a crash, time starts again from where the batch began.
                self._table.forget_ages(self._passed)
                self._stale = 0
