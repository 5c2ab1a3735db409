"""The kernel of a partition's fold: stream time, timers, redelivery and requests to forget. Pure: no Faust, no Kafka,
no wall clock.

An application folds its log record by record: `advance` moves the kernel to the record, then the expired requests and
the overdue keys are taken from it, then the application folds the record itself. Everything depends only on the log up
to the record.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from schemas.records import Forget, TaskHead
from streams.fold.clock import PartitionClock
from streams.fold.forgotten import Forgotten
from streams.fold.timers import Timers


class InvalidRecord(ValueError):
    """A record that breaks a limit, contradicts its key's state, or is not supported by this version. The state is
    unchanged; the record is a dead letter."""


class StateChanges(Protocol):
    """The receiver of a kernel's state changes, such as `streams.fold.changelog_buffer.ChangelogBuffer`."""

    def write(self, key: str, value: bytes) -> None:
        """Adds a value."""

    def delete(self, key: str) -> None:
        """Removes a value."""


class PartitionKernel:
    """The part of a partition's state that all folds share.

    Args:
        clock: the partition's clock; it is moved by `advance`.
        changes: takes the changes of the requests to forget.
        forget_ttl_ms: log time for which a request to forget is remembered.
    """

    def __init__(self, partition: int, clock: PartitionClock, changes: StateChanges, forget_ttl_ms: int) -> None:
        self._clock, self._changes = clock, changes
        self.timers = Timers[str]()
        """Timers of the ends of waits."""
        self.forgotten = Forgotten(partition, forget_ttl_ms)
        self._fired: set[str] = set()  # keys whose timers fired at the current record

    def advance(self, offset: int, timestamp: int) -> None:
        """Moves to a record, readable or not: its offset, above the last one, and its append time (ms)."""
        self._clock.advance(offset, timestamp)
        self._fired.clear()

    def drop_expired_requests(self) -> None:
        """Drops the requests to forget that have expired."""
        for key in self.forgotten.expire(self._clock.time):
            self._changes.delete(key)

    def overdue(self, due: Callable[[str], int | None]) -> Iterator[str]:
        """Yields the keys whose wait is over, in the order of (due, key). A wait is over if its end lies *before* the
        stream time: a record at exactly the deadline is in time.

        `due` returns the end of a key's wait (stream time in ms), None for a key that does not wait.
        """
        for key in self.timers.fire(self._clock.time, due):
            self._fired.add(key)
            yield key

    def redelivered(self, key: str, applied: int) -> bool:
        """Returns true if the key was restored with the current record already applied; `applied` is the last offset
        applied to it. A timer of the key that fired at this record does not count."""
        return self._clock.applied <= applied and key not in self._fired

    def remember(self, request: Forget) -> None:
        """Remembers the request to forget that is the current record."""
        self._changes.write(*self.forgotten.remember(self._clock.applied, self._clock.time, request))

    def forgets(self, head: TaskHead, opened_at: int) -> bool:
        """Returns true if a request before the current record covers a task that opened at `opened_at` (ms), but not
        after the current record."""
        return self.forgotten.concerns(head, min(opened_at, self._clock.time), self._clock.applied)
