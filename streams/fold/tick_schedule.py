"""Decides when a partition needs a tick: a record that only moves its stream time on.

A tick costs the broker, the changelog and the fold a write each, so none is sent that nothing waits for. The fold is
the same with more or fewer ticks: they decide when a wait is given up, never at which stream time it is over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

STILL_S = 30.0
"""Seconds without any progress of stream time after which a tick is sent although no wait ends: for what ages slowly
(markers, metrics), and for clocks that were stopped or set."""


@dataclass(slots=True)
class _Seen:
    """`time` is a partition's stream time in ms, `since` the moment at which it was first seen, `sent` that of the last
    tick."""

    time: int
    since: float
    sent: float


class TickSchedule:
    """Tells for each partition of a process if a tick is due. It does not read the wall clock, which may differ from
    the broker's.

    A record was appended before it was folded. So the broker's clock is at least at the stream time plus the seconds
    since the stream time was first seen, and a tick that is sent when this sum passes the end of a wait ends the wait.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, _Seen] = {}

    def folded(self, partition: int, time_ms: int) -> None:
        """Notes the stream time (ms) of a partition after a batch. Left out, ticks come up to a second later."""
        seen = self._seen.get(partition)
        if seen is not None and time_ms != seen.time:
            seen.time, seen.since = time_ms, self._clock()

    def due(self, partition: int, time_ms: int, earliest: int) -> bool:
        """Returns true if a tick must be sent to a partition now; ask once a second.

        If a tick did not end the wait (the broker's clock was set back), the next one is due at once. The first tick of
        a partition is always due: nobody knows how much time passed before.

        Args:
            time_ms: the partition's stream time in ms.
            earliest: no wait of the partition ends before this stream time.
        """
        self.folded(partition, time_ms)
        now = self._clock()
        seen = self._seen.get(partition)
        if seen is None:
            self._seen[partition] = _Seen(time_ms, now, now)
            return True
        still = now - max(seen.since, seen.sent) >= STILL_S
        if not still and time_ms + (now - seen.since) * 1000 <= earliest:
            return False
        seen.sent = now
        return True

    def forget(self, partition: int) -> None:
        """Forgets a partition, which was revoked or restored."""
        self._seen.pop(partition, None)
