"""Dead letters, whoever writes them: the context in their headers (key and value bytes stay as they were), and the
limits past which a process stops instead, because the fault is elsewhere.
"""

from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime

from tentalis.service import NEEDS_PERSON

PREFIX = "tentalis.dlq."
MESSAGE_BYTES = 1024
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


def app_version() -> str:
    """The version of this installation, for dead letters."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tentalis")
    except PackageNotFoundError:
        return "unknown"


def class_of(error: BaseException) -> str:
    """What dead letters call an error's class: with its module, without `builtins`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def context_headers(
    *,
    topic: str,
    partition: int,
    offset: int,
    timestamp: int,
    group: str,
    error_class: str,
    error: str,
    stage: str,
    attempts: int,
    version: str,
    failed_at: float,
) -> tuple[tuple[str, bytes], ...]:
    """Where the record lay (timestamp in ms), who failed on it (`version` of the application), why, and when
    (`failed_at`, seconds since the epoch). ASCII, at most MESSAGE_BYTES each.
    """
    context = {
        "original-topic": topic,
        "original-partition": str(partition),
        "original-offset": str(offset),
        "original-timestamp": str(timestamp),
        "consumer-group": group,
        "error-class": error_class,
        "error-message": error,
        "error-stage": stage,
        "attempts": str(attempts),
        "app-version": version,
        "failed-at": datetime.fromtimestamp(failed_at, UTC).isoformat(timespec="milliseconds"),
    }
    return tuple(
        (PREFIX + name, text.encode("ascii", "backslashreplace")[:MESSAGE_BYTES]) for name, text in context.items()
    )
