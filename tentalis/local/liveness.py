"""Whether a process that should be giving signs of life has been silent for too long. Pure: times are handed in."""

from __future__ import annotations

from dataclasses import dataclass

# Ticks of the supervisor are a twentieth of a second apart; a longer pause is its own, and says nothing about others.
LONGEST_TICK = 2.0


class AwakeClock:
    """Seconds for which the supervisor has been awake.

    While a laptop sleeps, or the machine or the whole group of processes is stopped, nobody can answer and nobody asks.
    On the wall's clock everybody would have been silent since then; on this one, nobody has.
    """

    def __init__(self, monotonic: float) -> None:
        self._last = monotonic
        self.now = 0.0

    def tick(self, monotonic: float) -> float:
        """Takes the time of the monotonic clock, often; returns `now`."""
        self.now += min(monotonic - self._last, LONGEST_TICK)
        self._last = monotonic
        return self.now


@dataclass(slots=True)
class Silence:
    """How long a process has been silent that could have spoken. Times are those of an AwakeClock."""

    since: float

    def heard(self, now: float) -> None:
        """It gave a sign of life, or what it depends on is away, so that it need not."""
        self.since = now

    def seconds(self, now: float) -> float:
        """So long it has been silent."""
        return now - self.since
