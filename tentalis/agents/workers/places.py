"""The places of a worker: the number of tasks that are answered at the same time. Pure, for one event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Places:
    """`count` places. A task takes one, and lends it while it only waits, so that another task can be answered."""

    def __init__(self, count: int) -> None:
        self._count, self._taken, self._lent = count, 0, 0
        self._left = asyncio.Event()

    @property
    def free(self) -> bool:
        """True if a place is free."""
        return self._taken < self._count

    @property
    def lent(self) -> int:
        """Number of tasks that have lent their place."""
        return self._lent

    def take(self) -> None:
        """Takes a place, also if none is free: then no further one is free until enough are left."""
        self._taken += 1

    def leave(self) -> None:
        """Gives a place back for good."""
        self._taken -= 1
        self._left.set()
        self._left = asyncio.Event()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Gives a place back for the time of the block."""
        self._lent += 1
        self.leave()
        try:
            yield
        finally:
            self.take()
            self._lent -= 1

    async def exchange(self) -> None:
        """Gives a place back and takes another one, as soon as one is free."""
        with self.lending():
            while not self.free:
                await self._left.wait()
