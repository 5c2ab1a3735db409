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
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.bridge.ports import Found
from tentalis.gateway.bridge.routes import router
from tentalis.gateway.bridge.service import Bridge
from tentalis.gateway.bridge.training import GroupAnswer
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Keys

R = TypeVar("R", bound=Record)


class MemoryLog:
    """One partition per topic. What is appended is handed to the bridge at once, what others `put` too."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Record]] = {}
        self.trouble: str | None = None
        self.away = False
        self.seen: Mapping[str, GroupAnswer] | None = {}
        self._take: Callable[[Found], None] = lambda found: None
        self._wanted: Callable[[], bool] = lambda: False

    def start(self, take: Callable[[Found], None], wanted: Callable[[], bool]) -> None:
        self._take, self._wanted = take, wanted

    def put(self, topic: str, record: Record) -> Fact:
        """As another process appends it."""
        known = self.topics.setdefault(topic, [])
        known.append(record)
        fact = Fact(topic, 0, len(known) - 1, int(time.time() * 1000), record.event_id)
        decoded = [(fact, record)] if self._wanted() or topic in topics.CONTROL else []
        facts = [] if topic in topics.CONTROL else [(fact, record.key.encode())]
        self._take(Found(facts, decoded))
        return fact

    async def append(self, topic: str, record: Record) -> Fact:
        await asyncio.sleep(0)
        if self.away:
            raise Refused(503, "the log is away", retry_after_s=2)
        return self.put(topic, record)

    async def records(self, facts: Sequence[Fact], kind: type[R]) -> list[tuple[Fact, R]]:
        await asyncio.sleep(0)
        found = [(fact, self.topics[fact.topic][fact.offset]) for fact in facts]
        return [(fact, record) for fact, record in found if isinstance(record, kind)]

    async def groups(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
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
    bridge = bridge_over(log, personal=personal or {})
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
