"""Who waits for a record of a key."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis.gateway.bridge.facts import short

MOST_POLLS = 1000


class Polls:
    """All on the event loop."""

    def __init__(self) -> None:
        self._polls: dict[bytes, set[asyncio.Future[None]]] = {}
        self._waiting = 0

    def arrived(self, topic: str, key: bytes) -> None:
        """A record of a key came: who waits for it hears so."""
        for poll in self._polls.get(short(topic, key), ()):
            if not poll.done():
                poll.set_result(None)

    @contextmanager
    def next(self, topic: str, key: str) -> Iterator[asyncio.Future[None] | None]:
        """Something to wait for the next record of a key with; None if too many wait."""
        if self._waiting >= MOST_POLLS:
            yield None
            return
        name, arrived = short(topic, key), asyncio.get_running_loop().create_future()
        self._polls.setdefault(name, set()).add(arrived)
        self._waiting += 1
        try:
            yield arrived
        finally:
            self._waiting -= 1
            waiting = self._polls[name]
            waiting.discard(arrived)
            if not waiting:
                del self._polls[name]
