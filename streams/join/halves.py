"""Halves that wait, where the state lies on disk: in memory only the newest, since most are joined soon."""

from collections import deque

from streams.join.state import Payload, half_key
from streams.processor import StateError, Table

HOT_BYTES = 8 * 2**20
"""Of decoded halves that are kept per partition, beside those of the batch at hand."""
OBJECT_BYTES = 3 * 2**10
"""What a decoded half takes besides its bytes; most of them are hints of a few hundred."""


class HalvesOnDisk:
    """Which waiting halves of a partition are in memory, oldest first."""

    def __init__(self, table: Table, partition: int) -> None:
        self._table, self._partition = table, partition
        self._hot: deque[tuple[Payload, int]] = deque()
        self._bytes = 0
        self._flushed = 0

    def add(self, payload: Payload, size: int) -> None:
        """A half that now waits, decoded, and its bytes on the log."""
        self._hot.append((payload, size + OBJECT_BYTES))
        self._bytes += size + OBJECT_BYTES

    def flushed(self) -> None:
        """What was added so far will be in the table before the next call."""
        # So what was there at the last call is in the table by now.
        while self._flushed and self._bytes > HOT_BYTES:
            payload, size = self._hot.popleft()
            payload.record = None
            self._bytes -= size
            self._flushed -= 1
        self._flushed = len(self._hot)

    def value(self, offset: int) -> bytes:
        """The state value of a half that is not in memory. Raises StateError."""
        key = half_key(self._partition, offset)
        value = self._table.get(key)
        if not isinstance(value, bytes):
            raise StateError(f"a task waits with the half {key}, which is not in the state")
        return value
