"""Marks of the session events that were on the log within the last `ttl_ms`, to recognise an event that is sent again.

A mark lies under `seen/<hash of session and event id>`: the offset of the event, and its stream time.
"""

import struct
from collections.abc import Iterator

from schemas.records import SessionEvent
from streams.fold.hashing import short
from streams.fold.session_turns import session_key
from streams.fold.timers import Timers
from streams.runtime.processor import OFFSET_BYTES, DamagedState, applied_offset, stamped

SEEN = "seen/"
_TIME = struct.Struct(">q")


class RecentEvents:
    """Events that were on the log within the last `ttl_ms` of log time."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._events: dict[str, tuple[int, int]] = {}  # hash -> (offset, stream time)
        self._ages = Timers[str]()

    def __len__(self) -> int:
        return len(self._events)

    def before(self, event: SessionEvent, offset: int) -> bool:
        """Returns true if the event was on the log before this offset."""
        known = self._events.get(_mark(event))
        return known is not None and known[0] < offset

    def add(self, event: SessionEvent, offset: int, time: int) -> tuple[str, bytes]:
        """Adds an event; returns its key and value on the changelog."""
        mark = _mark(event)
        self._put(mark, offset, time)
        return SEEN + mark, stamped(offset, _TIME.pack(time))

    def restore(self, mark: str, value: bytes) -> None:
        """Restores an event from the changelog: its key without the prefix SEEN, and its value. Raises DamagedState."""
        try:
            self._put(mark, applied_offset(value), _TIME.unpack_from(value, OFFSET_BYTES)[0])
        except (ValueError, struct.error) as error:
            raise DamagedState(f"the state has an invalid event mark: {value[:64].hex()}") from error

    def expire(self, now: int) -> Iterator[str]:
        """Removes the events that have expired at a stream time; yields their keys."""
        for mark in self._ages.fire(now - self._ttl_ms, self._seen_at):
            del self._events[mark]
            yield SEEN + mark

    def _seen_at(self, mark: str) -> int | None:
        known = self._events.get(mark)
        return None if known is None else known[1]

    def _put(self, mark: str, offset: int, time: int) -> None:
        self._events[mark] = offset, time
        self._ages.set(mark, time)


def _mark(event: SessionEvent) -> str:
    return short(session_key(event), event.session_event_id).hex()
