"""Detects stalled topic-partitions, independently of the progress of the others. No clock, no Kafka."""

from collections.abc import Collection, Mapping

Place = tuple[str, int]
"""Topic and partition."""

LOOK_S = 5.0
"""Upper limit of the time between two calls of `look` on an event loop that is not blocked."""


class StallDetector:
    """The time since which each topic-partition is stalled: it has unread records, makes no progress and has no reason
    to wait. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: dict[Place, float] = {}
        self._looked = 0.0

    def begin(self) -> None:
        """Resets after an assignment: no partition is stalled."""
        self._since.clear()

    def look(
        self,
        now: float,
        lag: Mapping[Place, int],
        *,
        taken: Collection[Place],
        excused: Collection[int],
        finished: Mapping[Place, float],
    ) -> tuple[float, Place | None]:
        """The topic-partition that is stalled longest, and since when: (time, place); (now, None) if none is.

        Args:
            lag: records behind, for all owned topic-partitions.
            taken: the topic-partitions with records in a partition queue. They share the queue, so a completed batch of
                any topic is progress for all of them. The others wait for the fetcher: the queue's progress says
                nothing about them.
            excused: partitions that wait for an external service.
            finished: when a batch of each was last confirmed.
        """
        # No partition can progress while the event loop is blocked, for example by restoring state.
        held_up = max(0.0, now - self._looked - LOOK_S)
        self._looked = now
        newest: dict[int, float] = {}
        for (_, partition), at in finished.items():
            newest[partition] = max(at, newest.get(partition, at))
        since = {}
        for place, behind in lag.items():
            if not behind or place[1] in excused:
                continue
            moved = newest.get(place[1]) if place in taken else finished.get(place)
            begun = min(now, self._since.get(place, now) + held_up)
            since[place] = begun if moved is None else max(begun, moved)
        self._since = since
        slowest = min(since, key=lambda place: since[place], default=None)
        return (now, None) if slowest is None else (since[slowest], slowest)
