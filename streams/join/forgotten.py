"""Whom an application was asked to forget, and for how long it remembers that.

What is in flight when the request comes (a result not scored yet, feedback in a queue) becomes a half later, and a
client that goes on with a conversation sends all of it again.
So the requests themselves are state, one small value each under `forget/<partition>/<offset>`: the stream time at which
it came, and the request as JSON. They are kept as long as the topics that halves are made from keep their records.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator

from schemas.records import Forget, TaskHead
from streams.processor import OFFSET_BYTES, StateError, applied_offset, stamped

FORGET = "forget/"
FORGET_TTL_MS = 31 * 24 * 3600 * 1000
"""How long (log time) a request is remembered: longer than tasks, results, feedback and session events are kept."""

_AT = struct.Struct(">q")
_Named = tuple[str | None, str | None, str | None]


class Forgotten:
    """The requests of one partition, in log order."""

    def __init__(self, partition: int, ttl_ms: int) -> None:
        """`ttl_ms`: how long (log time) a request is remembered."""
        self._partition, self._ttl_ms = partition, ttl_ms
        self._requests: dict[int, tuple[int, Forget]] = {}  # offset -> (stream time, request)
        # By who and what is named, so that a half asks at most eight times, however many people have left.
        self._named: dict[_Named, dict[int, int | None]] = defaultdict(dict)  # -> offset -> before

    def __len__(self) -> int:
        return len(self._requests)

    def remember(self, offset: int, time: int, request: Forget) -> tuple[str, bytes]:
        """Takes a request in; its key and value on the changelog."""
        self._requests[offset] = time, request
        self._named[_named(request)][offset] = request.before
        return self._key(offset), stamped(offset, _AT.pack(time) + request.model_dump_json().encode())

    def restore(self, values: Iterable[bytes]) -> None:
        """Takes the values of the changelog in, in any order. Raises StateError."""
        found = []
        for value in values:
            try:
                offset, (time,) = applied_offset(value), _AT.unpack_from(value, OFFSET_BYTES)
                found.append((offset, time, Forget.model_validate_json(value[OFFSET_BYTES + _AT.size :])))
            except (ValueError, struct.error) as error:
                raise StateError(f"not a request to forget: {value[:64].hex()}") from error
        for offset, time, request in sorted(found, key=lambda item: item[0]):
            self.remember(offset, time, request)

    def expire(self, now: int) -> Iterator[str]:
        """Gives up what is over at a stream time; the keys."""
        # Stream time never falls, so the oldest are the first.
        while self._requests:
            offset, (time, request) = next(iter(self._requests.items()))
            if time + self._ttl_ms >= now:
                return
            del self._requests[offset]
            names = _named(request)
            del self._named[names][offset]
            if not self._named[names]:
                del self._named[names]
            yield self._key(offset)

    def concerns(self, head: TaskHead, opened_at: int, offset: int) -> bool:
        """Whether a request before `offset` is about a task that opened at `opened_at` (ms)."""
        if not self._requests:
            return False
        return any(
            at < offset and (before is None or opened_at < before)
            for session in (None, head.session_id)
            for user in (None, head.user_id)
            for policy in (None, head.policy)
            for at, before in self._named.get((session, user, policy), {}).items()
        )

    def _key(self, offset: int) -> str:
        return f"{FORGET}{self._partition}/{offset}"


def _named(request: Forget) -> _Named:
    return request.session_id, request.user_id, request.policy
