"""Dead letters: how a record that cannot be processed is kept, and when there are so many that the fault is
elsewhere."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.topics import dlq
from streams.processor import Dead, LogRecord
from tentalis.dlq import context_headers


class TooManyDead(Exception):
    """So many records fail that dead-lettering them would only empty the topic: the application stops."""


@dataclass(frozen=True, slots=True)
class Produce:
    """Bytes to send. `partition` None: murmur2 of the key."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


def key_bytes(key: str | None) -> bytes | None:
    """A record's key as it was on the log."""
    return None if key is None else key.encode("utf-8", "surrogateescape")


def letter(dead: Dead, *, group: str, attempts: int, version: str, failed_at: float) -> Produce:
    """The dead letter of a record: key and value bytes unchanged, its own headers first, then why it is here.

    Args:
        failed_at: seconds since the epoch.
    """
    record = dead.record
    headers = context_headers(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp=record.timestamp,
        group=group,
        error_class=dead.error_class,
        error=dead.error,
        stage=dead.stage,
        attempts=attempts,
        version=version,
        failed_at=failed_at,
    )
    value = None if record.tombstone else record.value
    return Produce(dlq(record.topic), key_bytes(record.key), value, record.headers + headers, record.partition)


class DeadLimits:
    """Stops an application that dead-letters a long run of records, or most of the recent ones.

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

    def check(self, records: Sequence[LogRecord], dead: Sequence[Dead]) -> None:
        """Counts a batch. Raises TooManyDead, before anything of it is sent."""
        # Dead letters of records read earlier (feedback that waited) say nothing about how this batch went.
        causes = {(item.record.topic, item.record.offset): item for item in dead}
        for record in records:
            cause = causes.get((record.topic, record.offset))
            self._count(cause is not None)
            if cause is None:
                continue
            why = f"The last: {record} at stage {cause.stage}: {cause.error_class}: {cause.error}"
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
