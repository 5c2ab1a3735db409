"""Logs the records that a reader cannot decode, or whose headers it cannot read: one line for many.

A process logs a line some seconds after it has found one, a command logs one line at its end.
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)

DELAY_S = 2.0


class SkippedRecords:
    """Counts records with the same trouble, and logs their number and the first of them. Thread-safe.

    Args:
        delay: the seconds from the first record to the line about it; None: `report` alone logs.
        one: the line for one record, which `%s` stands for.
        many: the line for several, with `%d` for their number and `%s` for the first.
    """

    def __init__(
        self,
        delay: float | None = DELAY_S,
        one: str = "skipped: %s",
        many: str = "%d records cannot be decoded and are skipped; the first: %s",
    ) -> None:
        self._delay = delay
        self._one, self._many = one, many
        self._lock = threading.Lock()
        self._count, self._first = 0, ""
        self._timer: threading.Timer | None = None

    def wait_for_report(self) -> None:
        """Logs nothing before `report` is called: the caller ends, and reports then."""
        with self._lock:
            self._delay = None

    def add(self, record: object) -> None:
        """Counts one more record; its error or place says which. If it is skipped, its owner dead-letters it, or
        another command names it."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._first = str(record)
            if self._timer is None and self._delay is not None:
                self._timer = threading.Timer(self._delay, self.report)
                self._timer.daemon = True
                self._timer.start()

    def report(self) -> None:
        """Logs the records since the last report, if there are any."""
        with self._lock:
            count, first, timer = self._count, self._first, self._timer
            self._count, self._first, self._timer = 0, "", None
        if timer is not None:
            timer.cancel()
        if count == 1:
            log.warning(self._one, first)
        elif count:
            log.warning(self._many, count, first)


SKIPPED = SkippedRecords()
"""The records that this process has skipped."""

WITHOUT_HEADERS = SkippedRecords(
    one="%s has a header name that is not UTF-8: its headers are left out",
    many="%d records have a header name that is not UTF-8: their headers are left out; the first: %s",
)
"""The records that this process has read without their headers."""

ALL = (SKIPPED, WITHOUT_HEADERS)
