"""Logs the records that a reader cannot decode: one line for many, however many there are.

A process logs a line some seconds after it has found one, a command logs one line at its end.
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)

DELAY_S = 2.0


class SkippedRecords:
    """Counts undecodable records, and logs their number and the first of them. Thread-safe.

    Args:
        delay: the seconds from the first record to the line about it; None: `report` alone logs.
    """

    def __init__(self, delay: float | None = DELAY_S) -> None:
        self._delay = delay
        self._lock = threading.Lock()
        self._count, self._first = 0, ""
        self._timer: threading.Timer | None = None

    def wait_for_report(self) -> None:
        """Logs nothing before `report` is called: the caller ends, and reports then."""
        with self._lock:
            self._delay = None

    def add(self, error: Exception) -> None:
        """Counts one more record. Its owner dead-letters it, or another command names it."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._first = str(error)
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
            log.warning("skipped: %s", first)
        elif count:
            log.warning("%d records cannot be decoded and are skipped; the first: %s", count, first)


SKIPPED = SkippedRecords()
"""The records that this process has skipped."""
