"""Live events for clients: a bounded queue for each; a client that reads too slowly is told and disconnected."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from schemas.records import (
    BatchPlan,
    Feedback,
    Hint,
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
from tentalis.gateway.api.offset_index import IndexedRecord
from tentalis.gateway.http.errors import APIError

MAX_CLIENTS = 64
MAX_QUEUED_EVENTS = 256
KEEP_ALIVE_S = 15.0

# The event name and fields of each record type: ids and numbers, never the text of a conversation.
_EVENT_FIELDS: dict[type[Record], tuple[str, tuple[str, ...]]] = {
    Task: ("task", ("task_id", "policy", "environment", "n_samples", "session_id", "turn_index", "run_id")),
    Result: ("result", ("result_id", "sample_index", "worker_id", "status", "finish_reason", "elapsed_s")),
    Feedback: ("feedback", ("task_id", "feedback_id", "sample_index", "source", "score", "polarity")),
    SessionEvent: ("session", ("session_id", "session_event_id", "turn_type", "policy", "model", "status", "done")),
    Hint: ("hint", ("hint_id", "kind", "source", "hinter", "feedback_id")),
    Outcome: ("outcome", ("sample_index", "kind", "reward", "has_rl", "has_opd", "worker_id")),
    RunManifest: ("run", ("run_id", "policy", "first_version", "world_size")),
    BatchPlan: ("plan", ("run_id", "policy", "step", "attempt")),
    StepResult: ("step", ("run_id", "policy", "step", "policy_version", "metrics")),
    PolicyUpdate: ("policy", ("policy", "version", "run_id", "step", "sha256")),
    Promotion: ("promotion", ("policy", "version", "mode", "by", "reason")),
    PolicyAck: ("served", ("policy", "version", "server_id", "ok", "error")),
}
NAMES = tuple(name for name, _ in _EVENT_FIELDS.values())


def event_of(ref: IndexedRecord, record: Record) -> tuple[str, str | None, dict[str, Any]] | None:
    """Name, user (None: of no user) and content of a record's event; None for a record type without events."""
    entry = _EVENT_FIELDS.get(type(record))
    if entry is None:
        return None
    name, fields = entry
    content = {field_name: getattr(record, field_name) for field_name in fields}
    if isinstance(record, Outcome):
        content["task_id"] = record.head.task_id
    if isinstance(record, Result):
        content["task_id"] = record.task.task_id
    if isinstance(record, Hint):
        content |= {"task_id": record.sample.head.task_id, "sample_index": record.sample.sample_index}
    position = {"topic": ref.topic, "partition": ref.partition, "offset": ref.offset, "appended": ref.appended_at}
    return name, _user_of(record), content | {"log": position}


def _user_of(record: Record) -> str | None:
    match record:
        case Task() | SessionEvent():
            return record.user_id
        case Result():
            return record.task.user_id
        case Outcome():
            return record.head.user_id
        case Hint():
            return record.sample.head.user_id
        case Feedback():
            return None if record.result is None else record.result.task.user_id
    return None


def encode_event(name: str, content: dict[str, Any], event_id: str = "") -> bytes:
    """Encodes a server-sent event."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


@dataclass(slots=True, eq=False)
class _Client:
    event_names: frozenset[str]
    user: str | None
    everybody: bool = True
    key_id: str = ""
    queue: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_EVENTS))
    final_event: bytes | None = None  # sent after the queue, to end the stream


class LiveEvents:
    """The event streams of all clients. Use it on the event loop only."""

    def __init__(self) -> None:
        self._clients: set[_Client] = set()
        self._open = 0  # includes dropped clients that have not read their last event

    @property
    def has_clients(self) -> bool:
        """True if a client watches."""
        return bool(self._clients)

    def publish(self, ref: IndexedRecord, record: Record) -> None:
        """Queues a record's event for the clients that watch it."""
        event = event_of(ref, record)
        if event is None:
            return
        name, user, content = event
        encoded: bytes | None = None
        for client in [c for c in self._clients if name in c.event_names and (c.everybody or c.user == user)]:
            encoded = encoded or encode_event(name, content, f"{ref.topic}/{ref.partition}/{ref.offset}")
            try:
                client.queue.put_nowait(encoded)
            except asyncio.QueueFull:
                reason = f"more than {MAX_QUEUED_EVENTS} events were waiting: connect again, and read faster"
                self._disconnect(client, encode_event("dropped", {"reason": reason}))

    def close(self) -> None:
        """Ends every stream: a stopping gateway would otherwise wait for them."""
        for client in list(self._clients):
            self._disconnect(client, encode_event("end", {"reason": "the gateway is stopping: connect again"}))

    def _disconnect(self, client: _Client, final_event: bytes) -> None:
        self._clients.discard(client)
        client.final_event = final_event
        if client.queue.empty():
            client.queue.put_nowait(b": no more\n\n")  # wakes the stream

    def watch(
        self,
        names: frozenset[str],
        user: str | None,
        seconds: float,
        *,
        everybody: bool = False,
        key_id: str = "",
        max_of_key: int = MAX_CLIENTS,
    ) -> AsyncGenerator[bytes]:
        """Streams the events of these names from now on, for `seconds`. `user`: only this user's events; None: those
        that belong to no user; `everybody`: all. A stream takes one of MAX_CLIENTS places, and one of the `max_of_key`
        places of its key, from the first read until it is closed.

        Raises APIError: 429 if all places of the key are taken, 503 if all places are.
        """
        if self._streams_of(key_id) >= max_of_key:
            raise APIError(
                429,
                f"this key has {max_of_key} open event streams, which is its limit: close one",
                "rate_limit_error",
                retry_after_s=10,
            )
        if self._open >= MAX_CLIENTS:
            raise APIError(503, f"all {MAX_CLIENTS} streams are in use: try again later", "api_error", retry_after_s=10)
        client = _Client(names, user, everybody, key_id)
        return self._stream(client, seconds, max_of_key, asyncio.get_running_loop().time)

    def _streams_of(self, key_id: str) -> int:
        """The open streams of a key; 0 for callers without a key."""
        return sum(client.key_id == key_id for client in self._clients) if key_id else 0

    async def _stream(
        self, client: _Client, seconds: float, max_of_key: int, clock: Callable[[], float]
    ) -> AsyncGenerator[bytes]:
        deadline = clock() + seconds
        if self._streams_of(client.key_id) >= max_of_key:  # others of the same key were opened at the same time
            yield encode_event("end", {"reason": f"this key has {max_of_key} open event streams, which is its limit"})
            return
        self._open += 1
        self._clients.add(client)
        try:
            yield b": watching\n\n"
            while (remaining := deadline - clock()) > 0:
                if client.final_event is not None and client.queue.empty():
                    break
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that coincides with an event.
                    async with asyncio.timeout(min(remaining, KEEP_ALIVE_S)):
                        event = await client.queue.get()
                except TimeoutError:
                    event = b": still here\n\n"
                yield event
            yield client.final_event or encode_event("end", {"reason": "the time is over"})
        finally:
            self._open -= 1
            self._clients.discard(client)
