"""What is remembered of a session, and the bytes of it on the changelog.

Five kinds of keys, each value behind its applied offset (8 bytes, see `streams.processor`):

- `turn/<partition>/<offset>`: the event of a session's last main turn, its bytes as they came, while what comes next is
  awaited. Written once, under a key that is never used again.
- `session/<hash of user and session>`: the header of a session. Rewritten whenever something changes. Once the session
  has ended it holds counts and nothing of a person.
- `seen/<hash of the event's id>`: that an event was on the log, and when.
- `forget/<partition>/<offset>`: a request to forget somebody (`streams.join.forgotten`).
- `clock/<partition>`: the stream time, and with its applied offset how far the partition was folded completely.
"""

import heapq
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.records import SessionEvent
from streams.join.state import short
from streams.processor import OFFSET_BYTES, StateError, applied_offset, payload_of, stamped

SESSION, TURN, SEEN = "session/", "turn/", "seen/"
VERSION = 1
_AT = struct.Struct(">q")


@dataclass(slots=True)
class Pending:
    """The last main turn, whose next state is awaited: where its event lies, at which stream time (ms) it came, which
    number it has. `value` is its state value, empty where that lies on disk; `size` the bytes of the event."""

    offset: int
    at: int
    index: int
    value: bytes = b""
    size: int = 0


@dataclass(slots=True)
class Session:
    """What is known of a session. `since`: stream time (ms) of its last main turn while it is open, else of its end or
    of what came last. `requests` counts all its turns, `turns` the main ones among them. Whose it is, is known while it
    is open."""

    applied: int
    since: int
    requests: int = 0
    turns: int = 0
    open: bool = False
    session_id: str | None = None
    user_id: str | None = None
    policy: str = ""
    pending: Pending | None = None
    timer: int | None = None
    """The stream time that a timer was last set to; not part of the header."""


def session_key(event: SessionEvent) -> str:
    """A session is one user's: two who chose the same id have two. 16 hex digits."""
    return short(event.user_id is not None, event.user_id or "", event.session_id).hex()


def encode_session(session: Session) -> bytes:
    """The value of a header."""
    pending = session.pending
    fields: dict[str, object] = {
        "version": VERSION,
        "since": session.since,
        "requests": session.requests,
        "turns": session.turns,
        "open": session.open,
    }
    if session.open:
        fields |= {"session_id": session.session_id, "user_id": session.user_id, "policy": session.policy}
    if pending is not None:
        fields["pending"] = [pending.offset, pending.at, pending.index]
    return stamped(session.applied, json.dumps(fields, separators=(",", ":")).encode())


def decode_session(value: bytes) -> Session:
    """A session from its header; the bytes of its pending turn are not in it. Raises StateError."""
    try:
        fields = json.loads(payload_of(value))
        if fields.pop("version") != VERSION:
            raise StateError(
                f"a session of another version than {VERSION}: let the version that wrote it end its sessions first"
            )
        pending = fields.pop("pending", None)
        found = Session(applied_offset(value), **fields)
        found.pending = None if pending is None else Pending(*pending)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"not the header of a session: {value[:64].hex()}") from error
    return found


class Seen:
    """Which events were on the log within the last `ttl_ms` of log time."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._events: dict[str, tuple[int, int]] = {}  # hash -> (offset, stream time)
        self._queue: list[tuple[int, str]] = []  # an entry whose time is not the event's is passed over

    def __len__(self) -> int:
        return len(self._events)

    def before(self, event: SessionEvent, offset: int) -> bool:
        """Whether the event was on the log before this offset."""
        known = self._events.get(_mark(event))
        return known is not None and known[0] < offset

    def add(self, event: SessionEvent, offset: int, time: int) -> tuple[str, bytes]:
        """An event is there; its key and value on the changelog."""
        mark = _mark(event)
        self._put(mark, offset, time)
        return SEEN + mark, stamped(offset, _AT.pack(time))

    def restore(self, key: str, value: bytes) -> None:
        """Takes a value of the changelog in. Raises StateError."""
        try:
            self._put(key[len(SEEN) :], applied_offset(value), _AT.unpack_from(value, OFFSET_BYTES)[0])
        except (ValueError, struct.error) as error:
            raise StateError(f"not the mark of an event: {value[:64].hex()}") from error

    def expire(self, now: int) -> Iterator[str]:
        """Forgets what is over at a stream time; the keys."""
        while self._queue and self._queue[0][0] + self._ttl_ms < now:
            time, mark = heapq.heappop(self._queue)
            known = self._events.get(mark)
            if known is not None and known[1] == time:
                del self._events[mark]
                yield SEEN + mark

    def _put(self, mark: str, offset: int, time: int) -> None:
        self._events[mark] = offset, time
        heapq.heappush(self._queue, (time, mark))


def _mark(event: SessionEvent) -> str:
    return short(session_key(event), event.session_event_id).hex()
