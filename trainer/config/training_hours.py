"""The hours in which a trainer trains; for the rest of the day the log is the buffer. Pure: a function of the instant.

A window is read off the wall clock of its time zone, so it follows daylight saving time: an hour that the clock skips
is not part of it, and an hour that the clock repeats counts twice. Steps do not depend on the windows, and a replay
ignores them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_HOURS = re.compile(r"^(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)$")
# The next opening of a daily window is never further away than a skipped hour plus one more day.
_HORIZON = timedelta(hours=50)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """The half-open interval [start, end) of a day; if `end` <= `start` it ends on the next day."""

    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> "DailyWindow":
        """Parses `02:00-06:00`; the end may be `24:00`. Raises ValueError."""
        match = _HOURS.match(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not of the form 02:00-06:00")
        h1, m1, h2, m2 = map(int, match.groups())
        if h1 > 23 or m1 > 59 or m2 > 59 or h2 * 60 + m2 > 24 * 60:
            raise ValueError(f"{text!r}: there is no such time of day")
        start, end = time(h1, m1), time(h2 % 24, m2)
        if start == end and (h1, m1) != (0, 0):
            raise ValueError(f"{text!r} is empty; the whole day is 00:00-24:00")
        return cls(start, end)

    def __contains__(self, clock: time) -> bool:
        if self.start < self.end:
            return self.start <= clock < self.end
        return clock >= self.start or clock < self.end


def zone_of(name: str) -> tzinfo:
    """Returns the time zone of an IANA name. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"{name!r} is not an IANA time zone known on this machine; an example is Europe/Berlin"
        ) from error


@dataclass(frozen=True, slots=True)
class TrainingHours:
    """The windows of one time zone; without any, training is always allowed."""

    hours: tuple[DailyWindow, ...]
    zone: tzinfo

    @classmethod
    def of(cls, hours: Sequence[str], zone: str) -> "TrainingHours":
        """Parses the hours and the zone's name. Raises ValueError."""
        return cls(tuple(map(DailyWindow.parse, hours)), zone_of(zone))

    def open_at(self, instant: datetime) -> bool:
        """True if training is allowed at an instant (timezone-aware)."""
        clock = instant.astimezone(self.zone).time()
        return not self.hours or any(clock in hours for hours in self.hours)

    def next_opening(self, instant: datetime) -> datetime | None:
        """Returns the first instant from `instant` on at which training is allowed, in the windows' time zone:
        `instant` itself if open, else a whole minute. None if there is none within two days."""
        # Steps through UTC, where every minute occurs once; clock changes are whole minutes.
        at = instant.astimezone(UTC)
        if at.second or at.microsecond:
            if self.open_at(at):
                return instant.astimezone(self.zone)
            at = at.replace(second=0, microsecond=0) + _MINUTE
        end = at + _HORIZON
        while at < end:
            if self.open_at(at):
                return at.astimezone(self.zone)
            at += _MINUTE
        return None
