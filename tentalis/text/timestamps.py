"""Points in time as users write them, the same for all commands."""

import re
import time
from datetime import UTC, datetime

FORMS = "2026-01-31T12:00:00Z, or an age: 90s, 30m, 1h, 2d"
_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_moment(text: str, now: int) -> int:
    """Parses an RFC 3339 time (UTC if it has no offset), or an age (`90s`, `30m`, `1h`, `2d`), to ms since the epoch.

    Raises ValueError.

    >>> parse_moment("1h", now=3_600_001)
    1
    """
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if ago is not None:
        return now - int(ago[1]) * _UNITS[ago[2]]
    try:
        return rfc3339_ms(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: write {FORMS}") from None


def rfc3339_ms(text: str) -> int:
    """Parses an RFC 3339 time (UTC if it has no offset) to ms since the epoch. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    try:
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except OverflowError as error:  # within hours of the first or last possible date
        raise ValueError(str(error)) from None


LAST_MS = 253_402_300_800_000
"""Midnight after the last day that RFC 3339 can express."""


def written(ms: int) -> str:
    """Formats ms since the epoch as RFC 3339 in UTC, to the second. A time that RFC 3339 cannot express stays a number.

    >>> written(1_000)
    '1970-01-01T00:00:01Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ms / 1000)) if 0 <= ms < LAST_MS else str(ms)


def now_ms() -> int:
    """The wall clock in ms since the epoch. Only for event times at the edge; decisions use the log's timestamps."""
    return time.time_ns() // 1_000_000
