"""The limits past which a process stops instead of dead-lettering, because the fault is elsewhere."""

from collections import deque
from collections.abc import Iterable

from tentalis.service import NEEDS_PERSON

EXIT_TOO_MANY_DEAD = NEEDS_PERSON


class TooManyDead(Exception):
    """So many records fail that dead-lettering them would only empty the topic: the process stops."""


class DeadLimits:
    """Stops a process that dead-letters a long run of records, or most of the recent ones.

    Args:
        run: dead records in a row that are still borne.
        ratio: share of dead records in the window that is still borne, once the window is full.
        window: records.
    """

    def __init__(self, run: int = 100, ratio: float = 0.5, window: int = 1000) -> None:
        self._max_run = run
        self._max_ratio = ratio
        self._recent: deque[bool] = deque(maxlen=window)
        self._dead = 0
        self._run = 0

    def check(self, records: Iterable[tuple[object, str | None]]) -> None:
        """Counts records in log order: what to call each (topic, partition, offset), and why it is dead, None if it is
        not. Raises TooManyDead; to be called before anything of them is sent.
        """
        for place, cause in records:
            self._count(cause is not None)
            if cause is None:
                continue
            why = f"The last: {place} {cause}"
            advice = "Nothing of this batch is committed. Repair the producer or the application, then start it again"
            if self._run > self._max_run:
                raise TooManyDead(
                    f"{self._run} records in a row could not be processed (limit {self._max_run}). {why}. {advice}"
                )
            full = len(self._recent) == self._recent.maxlen
            if full and self._dead > self._max_ratio * len(self._recent):
                raise TooManyDead(
                    f"{self._dead} of the last {len(self._recent)} records could not be processed "
                    f"(limit {self._max_ratio:.0%}). {why}. {advice}"
                )

    def _count(self, dead: bool) -> None:
        if len(self._recent) == self._recent.maxlen and self._recent[0]:
            self._dead -= 1
        self._recent.append(dead)
        self._dead += dead
        self._run = self._run + 1 if dead else 0
