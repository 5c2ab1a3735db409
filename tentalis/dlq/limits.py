"""The limits past which a process stops instead of dead-lettering, because the fault is elsewhere."""

from collections import deque
from collections.abc import Iterable

from tentalis.service.settings import DeadLetterThresholds


class TooManyDead(Exception):
    """So many records fail that dead-lettering them would only drain the topic: the process stops.

    Its exit code is ExitCode.NEEDS_OPERATOR.
    """


class DeadLetterLimits:
    """Stops a process that dead-letters a long run of records, or most of the recent ones.

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
        self._recent: deque[bool] = deque(maxlen=window)
        self._dead = 0
        self._run = 0

    @classmethod
    def of(cls, thresholds: DeadLetterThresholds, group: str) -> "DeadLetterLimits":
        """The limits of a process of this consumer group."""
        return cls(thresholds.run, thresholds.ratio, thresholds.window, group=group)

    def check(self, records: Iterable[tuple[object, str | None]]) -> None:
        """Counts the records of a batch. Call it before any dead letter of the batch is sent.

        Args:
            records: in log order, the record's place (topic, partition, offset) and the reason why it is dead, or None.

        Raises:
            TooManyDead: a limit is exceeded.
        """
        for place, cause in records:
            self._count(cause is not None)
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

    def _count(self, dead: bool) -> None:
        if len(self._recent) == self._recent.maxlen and self._recent[0]:
            self._dead -= 1
        self._recent.append(dead)
        self._dead += dead
        self._run = self._run + 1 if dead else 0
