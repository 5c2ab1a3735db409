"""Tasks that are remembered but not open, encoded: there are many, and few are touched again.

With the state in memory, all of them are in memory. With the state on disk, memory holds only those that the current
batch has written; the others are looked up. So open tasks bound the memory of such a worker, however many tasks close
in a day.
"""

from collections.abc import Iterator
from typing import Protocol

from streams.apps.join.state import TASK, Phase, phase_and_since
from streams.fold.timers import NEVER, Timers
from streams.runtime.processor import StateTable

FORGET_AT = 10_000
"""Number of expired markers whose ages are removed from the table's index together. Removed one by one, each would be a
separate range in RocksDB's buffer, all from the same key on; every read after a write sorts these ranges again, in time
and bytes that grow with the square of their number."""


class ClosedTasks(Protocol):
    """Values of tasks by id, each with the stream time since which the task is remembered (ms)."""

    @property
    def oldest(self) -> int:
        """No marker is older than this; NEVER if there are none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...

    def get(self, task_id: str) -> bytes | None:
        """Returns the value of a task, None if it is not remembered."""

    def put(self, task_id: str, since: int, value: bytes) -> None:
        """Remembers a task, or replaces its value."""

    def remove(self, task_id: str) -> None:
        """Removes a task that is open again."""

    def expire(self, before: int) -> Iterator[str]:
        """Removes the tasks older than `before`; yields their ids."""

    def flushed(self) -> None:
        """Announces that everything put so far will be in the table before the next call."""


class ClosedTasksInMemory:
    """Markers in a dict."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._ages = Timers[str]()

    @property
    def oldest(self) -> int:
        return self._ages.earliest

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, task_id: str) -> bytes | None:
        return self._values.get(task_id)

    def put(self, task_id: str, since: int, value: bytes) -> None:
        if task_id not in self._values:
            self._ages.set(task_id, since)
        self._values[task_id] = value

    def remove(self, task_id: str) -> None:
        self._values.pop(task_id, None)

    def expire(self, before: int) -> Iterator[str]:
        for task_id in self._ages.fire(before, self._since):
            del self._values[task_id]
            yield task_id

    def flushed(self) -> None:
        """Does nothing."""

    def _since(self, task_id: str) -> int | None:
        value = self._values.get(task_id)
        return None if value is None else phase_and_since(value)[1]


class ClosedTasksOnDisk:
    """Markers in a table. Memory holds those put since the last batch, and their total number.

    Stream time never falls and a marker is put at its time, so every new marker is younger than all expired ones.

    Args:
        before: markers older than this are not remembered.
    """

    def __init__(self, table: StateTable, before: int) -> None:
        self._oldest = NEVER
        self._table, self._passed = table, before
        self._fresh = ClosedTasksInMemory()
        self._opened: set[str] = set()
        self._flushed = False
        self._stale = 0
        self._count = table.count_aged()

    @property
    def oldest(self) -> int:
        return self._oldest

    def left(self) -> Iterator[str]:
        """Removes the markers that were too old at the start but are still in the table; yields their ids. Call it
        once, first."""
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
        self._oldest = min(self._oldest, since)

    def remove(self, task_id: str) -> None:
        if self.get(task_id) is not None:
            self._count -= 1
        self._fresh.remove(task_id)
        self._opened.add(task_id)

    def expire(self, before: int) -> Iterator[str]:
        self._settle()
        self._oldest = NEVER
        gone: dict[str, None] = {}
        for since, key in self._table.aged(self._passed):
            if since >= before:
                self._oldest = since
                break
            task_id = key[len(TASK) :]
            value = self.get(task_id)
            if value is not None and phase_and_since(value)[1] == since:
                gone[task_id] = None
        gone |= dict.fromkeys(self._fresh.expire(before))
        self._oldest = min(self._oldest, self._fresh.oldest)
        self._passed = before
        self._stale += len(gone)
        self._count -= len(gone)
        yield from gone

    def flushed(self) -> None:
        self._flushed = True

    def _settle(self) -> None:
        if self._flushed:
            self._flushed = False
            self._fresh, self._opened = ClosedTasksInMemory(), set()
            if self._stale >= FORGET_AT:
                # Not earlier: after a crash, time restarts at the beginning of the batch.
                self._table.forget_ages(self._passed)
                self._stale = 0
