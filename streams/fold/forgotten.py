"""Requests to forget, remembered for as long as their data may still arrive.

Data in flight when a request arrives (a result not scored yet, feedback in a queue) becomes a half later, and a client
that continues a conversation sends all of it again. So the requests are state, one small value each under
`forget/<partition>/<offset>`: the stream time at which the request arrived, and the request as JSON. They are kept as
long as the topics from which halves are made keep their records.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator

from schemas.records import Forget, TaskHead
from streams.fold.clock import DAY_MS
from streams.fold.timers import Timers
from streams.runtime.processor import OFFSET_BYTES, DamagedState, applied_offset, stamped

FORGET = "forget/"
FORGET_TTL_MS = 31 * DAY_MS
"""Log time for which a request is remembered: longer than tasks, results, feedback and session events are kept."""

_AT = struct.Struct(">q")
_Named = tuple[str | None, str | None, str | None]


class Forgotten:
    """The requests of one partition."""

    def __init__(self, partition: int, ttl_ms: int) -> None:
        """`ttl_ms`: log time for which a request is remembered."""
        self._partition, self._ttl_ms = partition, ttl_ms
        self._requests: dict[int, tuple[int, Forget]] = {}  # offset -> (stream time, request)
        # A restored request may be newer than one that is read again.
        self._ages = Timers[int]()
        # Indexed by the names in the request: a half needs at most eight look-ups, however many requests there are.
        self._named: dict[_Named, dict[int, int | None]] = defaultdict(dict)  # -> offset -> before

    def __len__(self) -> int:
        return len(self._requests)

    def remember(self, offset: int, time: int, request: Forget) -> tuple[str, bytes]:
        """Adds a request; returns its key and value on the changelog."""
        self._requests[offset] = time, request
        self._ages.set(offset, time)
        self._named[_named(request)][offset] = request.before
        return self._key(offset), stamped(offset, _AT.pack(time) + request.model_dump_json().encode())

    def restore(self, value: bytes) -> None:
        """Restores a request from its changelog value. Raises DamagedState."""
        time, request = self.decode(value)
        self.remember(applied_offset(value), time, request)

    @staticmethod
    def decode(value: bytes) -> tuple[int, Forget]:
        """Decodes a changelog value: the stream time of the request (ms), and the request. Raises DamagedState."""
        try:
            (time,) = _AT.unpack_from(value, OFFSET_BYTES)
            return int(time), Forget.model_validate_json(value[OFFSET_BYTES + _AT.size :])
        except (ValueError, struct.error) as error:
            raise DamagedState(f"the state has an invalid request to forget: {value[:64].hex()}") from error

    def expire(self, now: int) -> Iterator[str]:
        """Removes the requests that have expired at a stream time; yields their keys."""
        for offset in self._ages.fire(now - self._ttl_ms, self._remembered_at):
            _, request = self._requests.pop(offset)
            names = _named(request)
            del self._named[names][offset]
            if not self._named[names]:
                del self._named[names]
            yield self._key(offset)

    def concerns(self, head: TaskHead, opened_at: int, offset: int) -> bool:
        """Returns true if a request before `offset` covers a task that opened at `opened_at` (ms)."""
        if not self._requests:
            return False
        return any(
            at < offset and (before is None or opened_at < before)
            for session in (None, head.session_id)
            for user in (None, head.user_id)
            for policy in (None, head.policy)
            for at, before in self._named.get((session, user, policy), {}).items()
        )

    def _remembered_at(self, offset: int) -> int | None:
        known = self._requests.get(offset)
        return None if known is None else known[0]

    def _key(self, offset: int) -> str:
        return f"{FORGET}{self._partition}/{offset}"


def _named(request: Forget) -> _Named:
    return request.session_id, request.user_id, request.policy
