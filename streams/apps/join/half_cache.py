"""Cache of waiting halves, for state on disk: memory holds only the newest, since most halves are joined soon."""

from collections import deque
from collections.abc import Callable

from streams.apps.join.state import Payload
from streams.runtime.processor import DamagedState, StateTable

HOT_BYTES = 8 * 2**20
"""Bytes of decoded halves that are kept per partition, besides those of the current batch."""
OBJECT_BYTES = 3 * 2**10
"""Bytes that a decoded half takes besides its encoding; most halves are hints of a few hundred bytes."""


class HalfCache:
    """The waiting halves of a partition that are in memory, oldest first.

    Args:
        key: returns the state key of the half at an offset.
    """

    def __init__(self, table: StateTable, key: Callable[[int], str]) -> None:
        self._table, self._key = table, key
        self._hot: deque[tuple[Payload, int]] = deque()
        self._bytes = 0
        self._flushed = 0

    def add(self, payload: Payload, size: int) -> None:
        """Adds a decoded half that waits, with its size on the log in bytes."""
        self._hot.append((payload, size + OBJECT_BYTES))
        self._bytes += size + OBJECT_BYTES

    def flushed(self) -> None:
        """Evicts the oldest halves that are in the table. Everything added so far will be there before the next
        call."""
        # So everything added before the previous call is in the table by now.
        while self._flushed and self._bytes > HOT_BYTES:
            payload, size = self._hot.popleft()
            payload.record = None
            self._bytes -= size
            self._flushed -= 1
        self._flushed = len(self._hot)

    def value(self, offset: int) -> bytes:
        """Returns the state value of a half that is not in memory. Raises DamagedState."""
        key = self._key(offset)
        value = self._table.get(key)
        if not isinstance(value, bytes):
            raise DamagedState(f"a task holds the half {key}, which is missing from the state")
        return value
