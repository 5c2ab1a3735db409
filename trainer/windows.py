"""The hours in which a trainer trains; the rest of the day the log is its buffer. Pure: a function of the instant.

A window is read off the wall clock of its time zone, so it follows daylight saving: an hour that the clock skips is no
part of it, one that the clock repeats counts twice. Nothing of a step depends on it, and a replay knows nothing of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_HOURS = re.compile(r"^(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)$")
# A gap of the clock and a day without one more: the next opening of a daily window is never further away.
_HORIZON = timedelta(hours=50)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Hours:
    """From `start` to before `end` of the same day, or, where `end` is not after `start`, of the next."""

    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """`02:00-06:00`; `24:00` may end one. Raises ValueError."""
        found = _HOURS.match(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not of the form 02:00-06:00")
        h1, m1, h2, m2 = map(int, found.groups())
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
    """The time zone of an IANA name. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is no IANA time zone known here, as Europe/Berlin is") from error


@dataclass(frozen=True, slots=True)
class Windows:
    """Several windows of one time zone; none at all means always."""

    hours: tuple[Hours, ...]
    zone: tzinfo

    @classmethod
    def of(cls, hours: Sequence[str], zone: str) -> "Windows":
        """Raises ValueError."""
        return cls(tuple(map(Hours.parse, hours)), zone_of(zone))

    def open_at(self, instant: datetime) -> bool:
        """Whether to train at an instant (aware)."""
        clock = instant.astimezone(self.zone).time()
        return not self.hours or any(clock in hours for hours in self.hours)

    def next_opening(self, instant: datetime) -> datetime | None:
        """The first whole minute from `instant` on at which they are open, in their time zone; None if there is none
        within two days."""
        # Clocks change by whole minutes and only in UTC every minute comes once.
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
