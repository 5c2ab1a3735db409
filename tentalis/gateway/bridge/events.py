"""Live events for who watches: bounded for each client; who does not keep up is dropped and told."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from schemas.records import (
    BatchPlan,
    Feedback,
    Outcome,
    PolicyAck,
    PolicyUpdate,
    Promotion,
    Record,
    Result,
    RunManifest,
    SessionEvent,
    StepResult,
    Task,
)
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.failure import Refused

MOST_CLIENTS = 64
MOST_WAITING = 256
KEEP_ALIVE_S = 15.0

# What an event tells of a record: who and what, never what was said.
_TOLD: dict[type[Record], tuple[str, tuple[str, ...]]] = {
    Task: ("task", ("task_id", "policy", "environment", "n_samples", "session_id", "turn_index", "run_id")),
    Result: ("result", ("result_id", "sample_index", "worker_id", "status", "finish_reason", "elapsed_s")),
    Feedback: ("feedback", ("task_id", "feedback_id", "sample_index", "source", "score", "polarity")),
    SessionEvent: ("session", ("session_id", "session_event_id", "turn_type", "policy", "model", "status", "done")),
    Outcome: ("outcome", ("sample_index", "kind", "reward", "has_rl", "has_opd", "worker_id")),
    RunManifest: ("run", ("run_id", "policy", "first_version", "world_size")),
    BatchPlan: ("plan", ("run_id", "policy", "step", "attempt")),
    StepResult: ("step", ("run_id", "policy", "step", "policy_version", "metrics")),
    PolicyUpdate: ("policy", ("policy", "version", "run_id", "step", "sha256")),
    Promotion: ("promotion", ("policy", "version", "mode", "by", "reason")),
    PolicyAck: ("served", ("policy", "version", "server_id", "ok", "error")),
}
NAMES = tuple(name for name, _ in _TOLD.values())


def event_of(fact: Fact, record: Record) -> tuple[str, str | None, dict[str, Any]] | None:
    """Name, user (None: nobody's) and content of the event of a record, None for one that makes none."""
    known = _TOLD.get(type(record))
    if known is None:
        return None
    name, fields = known
    content = {each: getattr(record, each) for each in fields}
    if isinstance(record, Outcome):
        content["task_id"] = record.head.task_id
    if isinstance(record, Result):
        content["task_id"] = record.task.task_id
    place = {"topic": fact.topic, "partition": fact.partition, "offset": fact.offset, "appended": fact.appended}
    return name, _user_of(record), content | {"log": place}


def _user_of(record: Record) -> str | None:
    match record:
        case Task() | SessionEvent():
            return record.user_id
        case Result():
            return record.task.user_id
        case Outcome():
            return record.head.user_id
        case Feedback():
            return None if record.result is None else record.result.task.user_id
    return None


def written(name: str, content: dict[str, Any], event_id: str = "") -> bytes:
    """A server-sent event."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


@dataclass(slots=True, eq=False)
class _Client:
    names: frozenset[str]
    user: str | None
    waiting: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    last: bytes | None = None  # after what waits, where it is to end


class Events:
    """Who watches. All on the event loop."""

    def __init__(self) -> None:
        self._clients: set[_Client] = set()
        self._open = 0  # with those that were dropped and do not even read that

    @property
    def wanted(self) -> bool:
        """Whether anybody watches."""
        return bool(self._clients)

    def tell(self, fact: Fact, record: Record) -> None:
        """Sends a record's event to who wants it."""
        found = event_of(fact, record)
        if found is None:
            return
        name, user, content = found
        text: bytes | None = None
        for client in [c for c in self._clients if name in c.names and c.user in (None, user)]:
            text = text or written(name, content, f"{fact.topic}/{fact.partition}/{fact.offset}")
            try:
                client.waiting.put_nowait(text)
            except asyncio.QueueFull:
                why = f"more than {MOST_WAITING} events waited for you: connect again, and read faster"
                self._end(client, written("dropped", {"reason": why}))

    def end(self) -> None:
        """Ends every stream: the gateway stops, and would wait for them."""
        for client in list(self._clients):
            self._end(client, written("end", {"reason": "the gateway stops: connect again"}))

    def _end(self, client: _Client, last: bytes) -> None:
        self._clients.discard(client)
        client.last = last
        if client.waiting.empty():
            client.waiting.put_nowait(b": no more\n\n")  # somebody waits for it

    def watch(self, names: frozenset[str], user: str | None, seconds: float) -> AsyncGenerator[bytes]:
        """The events of these names from now on, for so many seconds. `user`: only what is theirs; None: everything.
        Whoever began to read it has one of the places until it is closed.

        Raises Refused (503) if too many watch.
        """
        if self._open >= MOST_CLIENTS:
            raise Refused(503, f"{MOST_CLIENTS} clients watch already: come again", "api_error", retry_after_s=10)
        return self._stream(_Client(names, user), seconds, asyncio.get_running_loop().time)

    async def _stream(self, client: _Client, seconds: float, clock: Callable[[], float]) -> AsyncGenerator[bytes]:
        deadline = clock() + seconds
        self._open += 1
        self._clients.add(client)
        try:
            yield b": watching\n\n"
            while (left := deadline - clock()) > 0:
                if client.last is not None and client.waiting.empty():
                    break
                try:
                    # Not wait_for, which forgets in Python 3.11 that it was cancelled when there is an event.
                    async with asyncio.timeout(min(left, KEEP_ALIVE_S)):
                        event = await client.waiting.get()
                except TimeoutError:
                    event = b": still here\n\n"
                yield event
            yield client.last or written("end", {"reason": "the time is over"})
        finally:
            self._open -= 1
            self._clients.discard(client)
