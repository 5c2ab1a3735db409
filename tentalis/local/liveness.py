"""Measures how long a process has given no sign of life. Pure: times are parameters."""

from __future__ import annotations

from dataclasses import dataclass

# The supervisor ticks four times a second or more often; a longer gap means that the supervisor itself was paused.
LONGEST_TICK = 2.0


class AwakeClock:
    """A clock of the seconds for which the supervisor has been awake.

    While a laptop sleeps, or the machine or the whole process group is stopped, no process can answer. By the wall
    clock, all processes would have been silent for that time; this clock does not count it.
    """

    def __init__(self, monotonic: float) -> None:
        self._last = monotonic
        self.now = 0.0

    def tick(self, monotonic: float) -> float:
        """Updates the clock from the monotonic clock and returns `now`. Call it often."""
        self.now += min(monotonic - self._last, LONGEST_TICK)
        self._last = monotonic
        return self.now


@dataclass(slots=True)
class Silence:
    """The time since the last sign of life of a process. Times are those of an AwakeClock."""

    since: float

    def heard(self, now: float) -> None:
        """Records a sign of life, or that a dependency is down, which excuses the silence."""
        self.since = now

    def seconds(self, now: float) -> float:
        """Returns the length of the silence in seconds."""
        return now - self.since
