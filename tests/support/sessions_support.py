"""Shared by the tests of the sessions: a log of session events made by hand, and workers whose flushes can be cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from schemas import topics
from schemas.records import (
    Feedback,
    Forget,
    LogprobsMode,
    Message,
    Record,
    Result,
    SessionEvent,
    SessionEventKind,
    Task,
    Tick,
)
from schemas.tensors import float32_bytes, int32_bytes
from schemas.wire.codec import Codec
from streams.apps.sessions.core import SessionLimits
from streams.apps.sessions.processor import SessionsProcessor
from streams.runtime.processor import LogRecord
from tentalis.signals import NAMES
from tests.support.join_support import Cut, Disk, Partitioned, drive

__all__ = ["Cut", "Disk", "drive"]

CODEC = Codec()
PARTITION = 3
START = 1_000_000
LIMITS = SessionLimits(frozenset(), idle_ms=1_000, remember_ms=5_000, forget_ttl_ms=9_000, most_bytes=20_000)
SEEING = replace(LIMITS, signals=NAMES)
"""Implicit signals are looked for."""


def said(*texts: str) -> tuple[Message, ...]:
    """A conversation: user and assistant take turns, unless a text names its role (`tool: ...`)."""
    found = []
    for number, text in enumerate(texts):
        role, colon, rest = text.partition(": ")
        found.append(
            Message(role=role, content=rest) if colon else Message(role=["user", "assistant"][number % 2], content=text)
        )
    return tuple(found)


def turn(ident: str, *texts: str, answer: str = "", session: str = "s", **fields: Any) -> SessionEvent:
    """A main turn whose answer is `answer of <ident>` unless said otherwise, three tokens long."""
    tokens = [sum(ident.encode()) % 1000 + i for i in range(3)]
    known: dict[str, Any] = {
        "session_event_id": ident,
        "event_time": START,
        "session_id": session,
        "worker_id": "gateway-1",
        "model": "assistant@v4",
        "policy": "assistant",
        "user_id": "ann",
        "gateway_id": "gateway-1",
        "messages": said(*texts),
        "response": answer or f"answer of {ident}",
        "prompt_token_ids": int32_bytes([7, 8]),
        "response_token_ids": int32_bytes(tokens),
        "sampler_logprobs": float32_bytes([-0.5] * 3),
        "logprobs_mode": LogprobsMode.PROCESSED,
        "finish_reason": "stop",
    }
    return SessionEvent(**(known | fields))


def side(ident: str, **fields: Any) -> SessionEvent:
    return turn(ident, "ping", turn_type="side", **fields)


def end(ident: str = "end", session: str = "s", **fields: Any) -> SessionEvent:
    known: dict[str, Any] = {"user_id": "ann"}
    return SessionEvent(
        session_event_id=ident, event_time=START, session_id=session, kind=SessionEventKind.END, **(known | fields)
    )


def tick() -> Tick:
    return Tick(event_time=0, partition=PARTITION)


def forget(**fields: Any) -> Forget:
    return Forget(forget_id="forget", event_time=START, **fields)


def record_at(offset: int, after: int, what: Record | bytes, key: str | None = None) -> LogRecord:
    if isinstance(what, bytes):
        return LogRecord(topics.SESSIONS, PARTITION, offset, START + after, key or "?", what)
    value = CODEC.encode(topics.SESSIONS, what)
    return LogRecord(topics.SESSIONS, PARTITION, offset, START + after, key or what.key, value)


def log_of(*timed: tuple[int, Record | bytes]) -> list[LogRecord]:
    """A log: (append time after START, record or bytes) each."""
    return [record_at(offset, after, what) for offset, (after, what) in enumerate(timed)]


def worker(entries: Mapping[str, bytes], limits: SessionLimits = LIMITS) -> SessionsProcessor:
    processor = SessionsProcessor(CODEC, limits)
    processor.restore(PARTITION, entries)
    return processor


class Sessions(Partitioned):
    """One partition of the sessions log and all that is written from it."""

    def __init__(self, log: Sequence[LogRecord], sessions: SessionLimits = LIMITS, disk: Disk | None = None) -> None:
        super().__init__(log, disk=disk)
        self.sessions = sessions

    def start(self) -> Any:
        return worker(self.entries(), self.sessions)

    @property
    def records(self) -> list[Record]:
        """The written records, in order."""
        return [CODEC.decode(value, topic=topic, partition=0, offset=0) for topic, _, value in self.written.produced]

    @property
    def tasks(self) -> list[Task]:
        return [record for record in self.records if isinstance(record, Task)]

    @property
    def results(self) -> list[Result]:
        return [record for record in self.records if isinstance(record, Result)]

    @property
    def feedback(self) -> list[Feedback]:
        return [record for record in self.records if isinstance(record, Feedback)]

    @property
    def heard(self) -> list[tuple[str, str, str]]:
        """(event that was answered, author, text) of all feedback."""
        found = []
        for feedback in self.feedback:
            assert feedback.result is not None
            found.append((feedback.result.task.metadata["session_event_id"], feedback.author, feedback.text))
        return found


def fold(*timed: tuple[int, Record | bytes], limits: SessionLimits = LIMITS) -> Sessions:
    """Returns the output of an undisturbed worker for a log, in one batch."""
    partition = Sessions(log_of(*timed), limits)
    partition.run()
    return partition


def alive(processor: SessionsProcessor) -> dict[str, bytes]:
    """All that a worker knows."""
    state = processor.partitions[PARTITION]
    headers = {key: state._header(key) or b"" for key in state._sessions}
    marks = {mark: str(at).encode() for mark, at in state._seen._events.items()}
    leavers = {str(offset): str(request).encode() for offset, request in state._kernel.forgotten._requests.items()}
    pending = {key: session.pending for key, session in state._sessions.items() if session.pending is not None}
    waiting = {f"turn {key}": state._event_of(turn).model_dump_json().encode() for key, turn in pending.items()}
    known = f"{state.applied} {state.time} {state.open_sessions} {state.open_bytes}"
    return headers | marks | leavers | waiting | {"": known.encode()}
