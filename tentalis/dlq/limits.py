"""The limits past which a process stops instead of dead-lettering, because the fault is elsewhere."""

import logging
from collections import Counter, deque
from collections.abc import Iterable

from tentalis.service.settings import DeadLetterThresholds

log = logging.getLogger(__name__)

KEY_SHARE = 5
"""A key is quarantined once its dead records in the window are this part of the longest tolerated run."""


class TooManyDead(Exception):
    """So many records fail that dead-lettering them would only drain the topic: the process stops.

    Its exit code is ExitCode.NEEDS_OPERATOR.
    """


class DeadLetterLimits:
    """Stops a process that dead-letters a long run of records, or most of the recent ones.

    One key cannot stop it: after a fifth of the tolerated run, further dead records of the same key are dead-lettered
    without being counted (the key is quarantined). A fault of the process shows in the records of several keys.

    Args:
        run: longest tolerated run of dead records.
        ratio: largest tolerated share of dead records in the window, once the window is full.
        window: number of recent records.
        group: the consumer group of the process, for the message.
    """

    def __init__(self, run: int = 100, ratio: float = 0.5, window: int = 1000, *, group: str = "GROUP") -> None:
        self._group = group
        self._max_run = run
        self._max_ratio = ratio
        self._most_of_a_key = max(1, run // KEY_SHARE)
        self._recent: deque[tuple[bool, str | None]] = deque(maxlen=window)
        self._dead_by_key: Counter[str] = Counter()
        self._quarantined: set[str] = set()
        self._dead = 0
        self._run = 0

    @classmethod
    def of(cls, thresholds: DeadLetterThresholds, group: str) -> "DeadLetterLimits":
        """The limits of a process of this consumer group."""
        return cls(thresholds.run, thresholds.ratio, thresholds.window, group=group)

    @property
    def quarantined(self) -> frozenset[str]:
        """The keys whose dead records are not counted now."""
        return frozenset(self._quarantined)

    def check(self, records: Iterable[tuple[object, str | None, str | None]]) -> None:
        """Counts the records of a batch. Call it before any dead letter of the batch is sent.

        Args:
            records: in log order, the record's place (topic, partition, offset), the reason why it is dead, or None,
                and its key. None: no quarantine, because one key may be all that there is.

        Raises:
            TooManyDead: a limit is exceeded.
        """
        for place, cause, key in records:
            if cause is not None and self._is_quarantined(key, place):
                continue
            self._count(cause is not None, key)
            if cause is None:
                continue
            last_failure = f"The last: {place} {cause}"
            advice = (
                "Nothing of this batch was committed. Fix the producer or the application, then start it again. To go "
                f"on without the bad records, stop it and run `tentalis groups skip {self._group} --until-good`: it "
                "shows what it would move to the dead letters, and does it with --yes"
            )
            if self._run > self._max_run:
                raise TooManyDead(
                    f"{self._run} records in a row could not be processed (limit {self._max_run}). "
                    f"{last_failure}. {advice}"
                )
            window_full = len(self._recent) == self._recent.maxlen
            if window_full and self._dead > self._max_ratio * len(self._recent):
                raise TooManyDead(
                    f"{self._dead} of the last {len(self._recent)} records could not be processed "
                    f"(limit {self._max_ratio:.0%}). {last_failure}. {advice}"
                )

    def _is_quarantined(self, key: str | None, place: object) -> bool:
        if key is None or self._dead_by_key[key] < self._most_of_a_key:
            return False
        if key not in self._quarantined:
            self._quarantined.add(key)
            log.error(
                "%s: %d recent records of the key %r could not be processed: the key is quarantined. Its bad records "
                "go to the dead letters and no longer count towards the limits (docs/operations/dead-letters.md)",
                *(place, self._dead_by_key[key], key),
            )
        return True

    def _count(self, dead: bool, key: str | None) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._forget(*self._recent[0])
        self._recent.append((dead, key))
        self._dead += dead
        self._run = self._run + 1 if dead else 0
        if dead and key is not None:
            self._dead_by_key[key] += 1

    def _forget(self, dead: bool, key: str | None) -> None:
        self._dead -= dead
        if not dead or key is None:
            return
        self._quarantined.discard(key)
        self._dead_by_key[key] -= 1
        if not self._dead_by_key[key]:
            del self._dead_by_key[key]
