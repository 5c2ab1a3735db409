"""A log in memory for the bridge, and its routes over it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from schemas import topics
from schemas.records import Record
from tentalis.gateway.api.offset_index import IndexedRecord
from tentalis.gateway.api.record_log import LogBatch
from tentalis.gateway.api.routes import router
from tentalis.gateway.api.service import Bridge
from tentalis.gateway.api.training import GroupAnswer
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Keys

R = TypeVar("R", bound=Record)


class MemoryLog:
    """One partition per topic. What is appended is handed to the bridge at once, what others `put` too."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Record]] = {}
        self.stale_reason: str | None = None
        self.away = False
        self.seen: Mapping[str, GroupAnswer] | None = {}
        self._on_batch: Callable[[LogBatch], None] = lambda found: None
        self._decode_all: Callable[[], bool] = lambda: False

    def start(self, on_batch: Callable[[LogBatch], None], decode_all: Callable[[], bool]) -> None:
        self._on_batch, self._decode_all = on_batch, decode_all

    def put(self, topic: str, record: Record) -> IndexedRecord:
        """As another process appends it."""
        known = self.topics.setdefault(topic, [])
        known.append(record)
        ref = IndexedRecord(topic, 0, len(known) - 1, int(time.time() * 1000), record.event_id)
        decoded = [(ref, record)] if self._decode_all() or topic in topics.CONTROL else []
        refs = [] if topic in topics.CONTROL else [(ref, record.key.encode())]
        self._on_batch(LogBatch(refs, decoded))
        return ref

    async def append(self, topic: str, record: Record) -> IndexedRecord:
        await asyncio.sleep(0)
        if self.away:
            raise APIError(503, "the log is away", retry_after_s=2)
        return self.put(topic, record)

    async def records(self, refs: Sequence[IndexedRecord], record_type: type[R]) -> list[tuple[IndexedRecord, R]]:
        await asyncio.sleep(0)
        found = [(ref, self.topics[ref.topic][ref.offset]) for ref in refs]
        return [(ref, record) for ref, record in found if isinstance(record, record_type)]

    async def consumer_groups(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
        return self.seen, 0.0

    def close(self) -> None:
        pass


def bridge_over(log: MemoryLog, **more: Any) -> Bridge:
    return Bridge(log, gateway_id="gateway-1", policy="assistant", **more)


def app_over(bridge: Bridge, keys: Keys | None = None, **more: Any) -> FastAPI:
    app = FastAPI(title="bridge")
    app.include_router(router(bridge, keys or Keys(None), body_bytes=2**20, body_s=30.0, **more))
    return app


@asynccontextmanager
async def client_of(
    log: MemoryLog, keys: Keys | None = None, *, personal: Mapping[str, frozenset[str]] | None = None, **more: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Requests to a bridge over a log, on this event loop."""
    bridge = bridge_over(log, policy_owners=personal or {})
    app = app_over(bridge, keys, **more)
    transport = httpx.ASGITransport(app)
    async with bridge.running(), httpx.AsyncClient(transport=transport, base_url="http://bridge") as client:
        yield client


@contextmanager
def served(app: FastAPI, **more: Any) -> Iterator[str]:
    """The app on a port of its own, in a thread; yields its base URL."""
    import uvicorn

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", **more)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
