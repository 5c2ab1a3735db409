"""The tasks that a worker holds because the trainer would drop their answers. Pure."""

from collections import deque
from collections.abc import Callable

from schemas.records import Task
from tentalis.kafka.consumer import Stored


class HeldTasks:
    """Tasks with their records, the oldest first."""

    def __init__(self) -> None:
        self._held: deque[tuple[Stored, Task]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, stored: Stored, task: Task) -> None:
        """Adds a task after the others."""
        self._held.append((stored, task))

    def take(self, wanted: Callable[[Task], bool]) -> tuple[Stored, Task] | None:
        """Removes and returns the oldest task that is wanted; None if none is."""
        for place, (stored, task) in enumerate(self._held):
            if wanted(task):
                del self._held[place]
                return stored, task
        return None

    def remove(self, gone: Callable[[Stored], bool]) -> list[Stored]:
        """Removes tasks by their records, which it returns."""
        removed = [stored for stored, _ in self._held if gone(stored)]
        self._held = deque((stored, task) for stored, task in self._held if not gone(stored))
        return removed
