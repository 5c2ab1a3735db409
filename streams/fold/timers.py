"""Timers of the keys of one partition, in stream time."""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

NEVER = 2**63

K = TypeVar("K", str, int)


class Timers(Generic[K]):
    """A heap of (time, key). To move a timer, set it again: an entry whose time is no longer its key's is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, K]] = []

    @property
    def earliest(self) -> int:
        """No timer is earlier than this; NEVER if there are none."""
        return self._heap[0][0] if self._heap else NEVER

    def set(self, key: K, time: int) -> None:
        """Sets the timer of a key."""
        heapq.heappush(self._heap, (time, key))

    def fire(self, before: int, time_of: Callable[[K], int | None]) -> Iterator[K]:
        """Removes the timers before a time, in the order of (time, key); yields their keys. The consumer may set timers
        while it iterates; those before the time fire too.

        `time_of` returns the present time of a key's timer, None for a key without a timer.
        """
        while self._heap and self._heap[0][0] < before:
            time, key = heapq.heappop(self._heap)
            if time_of(key) == time:
                yield key
