"""Which topic-partition stands still, whatever the others do. No clock, no Kafka."""

from collections.abc import Collection, Mapping

Place = tuple[str, int]
"""Topic and partition."""

LOOK_S = 5.0
"""Between two looks on an event loop that nothing holds up."""


class Progress:
    """Since when each topic-partition stands still: there is something to read, and it neither gets on nor may wait.
    Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: dict[Place, float] = {}
        self._looked = 0.0

    def begin(self) -> None:
        """Other partitions are owned now: nothing stands still."""
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
        """Since when the one stands still that does so for longest, and which; (now, None) if none does.

        Args:
            lag: records behind, of all that are owned.
            taken: those with records in a lane. They take turns there: a batch of any topic gets such a lane on. The
                others wait for the fetcher, and no lane vouches for it.
            excused: partitions that wait for something outside.
            finished: when a batch of each was last confirmed.
        """
        # Nobody could get on while the event loop was held up, by state that is taken over for one.
        held_up = max(0.0, now - self._looked - LOOK_S)
        self._looked = now
        lanes: dict[int, float] = {}
        for (_, partition), at in finished.items():
            lanes[partition] = max(at, lanes.get(partition, at))
        since = {}
        for place, behind in lag.items():
            if not behind or place[1] in excused:
                continue
            moved = lanes.get(place[1]) if place in taken else finished.get(place)
            begun = min(now, self._since.get(place, now) + held_up)
            since[place] = begun if moved is None else max(begun, moved)
        self._since = since
        slowest = min(since, key=lambda place: since[place], default=None)
        return (now, None) if slowest is None else (since[slowest], slowest)
