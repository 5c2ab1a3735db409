"""Long polls that wait for a record with a key."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis.gateway.api.offset_index import hash_key

MAX_POLLS = 1000


class LongPolls:
    """The waiting polls. Use it on the event loop only."""

    def __init__(self) -> None:
        self._waiters: dict[bytes, set[asyncio.Future[None]]] = {}
        self._count = 0

    def wake(self, topic: str, key: bytes) -> None:
        """Wakes the polls that wait for a record with this key."""
        for waiter in self._waiters.get(hash_key(topic, key), ()):
            if not waiter.done():
                waiter.set_result(None)

    @contextmanager
    def next_record(self, topic: str, key: str) -> Iterator[asyncio.Future[None] | None]:
        """Yields a future that completes with the next record of a key; None if MAX_POLLS polls wait already."""
        if self._count >= MAX_POLLS:
            yield None
            return
        key_hash, future = hash_key(topic, key), asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key_hash, set()).add(future)
        self._count += 1
        try:
            yield future
        finally:
            self._count -= 1
            waiters = self._waiters[key_hash]
            waiters.discard(future)
            if not waiters:
                del self._waiters[key_hash]
