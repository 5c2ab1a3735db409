"""The usage of API keys, checked against their limits. In memory; `usage_store` keeps the counts of days on disk.

A restart forgets the requests and tokens of the current minute, and the counts since the start that the metrics show.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from tentalis.gateway.http.errors import SPENT, APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Caller
from tentalis.gateway.http.usage_store import KEPT_DAYS, DayUse

WINDOW_S = 60.0
_MAX_KEYS = 100_000
_RETRY_RUNNING_S = 1


@dataclass(slots=True)
class KeyUse:
    """The usage of one key: in the current window, of the current UTC day, and in all since the start."""

    window_began: float
    today: DayUse
    window_requests: int = 0
    window_tokens: int = 0
    running: int = 0
    requests: int = 0
    tokens: int = 0
    refused: int = 0


class KeyUsage:
    """Counts the usage of each key and refuses what is over its limits. A caller without a key is counted, not limited:
    it is a program of this machine, or the operator has chosen to require no keys. Use it on the event loop only.

    Args:
        limits: those of every key without own limits.
        clock: seconds of a clock that never steps back; `wall_clock`: seconds since the epoch.
    """

    def __init__(
        self,
        limits: KeyLimits,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._clock, self._wall_clock = clock, wall_clock
        self._by_key: OrderedDict[str, KeyUse] = OrderedDict()
        self._unsaved: dict[tuple[str, str], DayUse] = {}

    @property
    def day(self) -> str:
        """The current UTC day, as YYYY-MM-DD."""
        return self._date.isoformat()

    @property
    def oldest_day(self) -> str:
        """The oldest day whose counts are kept on disk."""
        return (self._date - timedelta(days=KEPT_DAYS - 1)).isoformat()

    def limits_of(self, caller: Caller) -> KeyLimits:
        """The limits of a caller: its key's own, else those of the gateway."""
        return self.limits.replaced_by(caller.limits)

    def admit(self, caller: Caller) -> None:
        """Counts a request. Raises APIError (429)."""
        use = self._current(caller.key_id)
        if caller.key_id:
            limits = self.limits_of(caller)
            if use.window_requests >= limits.requests_per_minute:
                self._refuse(use, caller, f"{limits.requests_per_minute} requests per minute", self._window_left(use))
            if use.window_tokens >= limits.tokens_per_minute:
                self._refuse(use, caller, f"{limits.tokens_per_minute} tokens per minute", self._window_left(use))
            if limits.tokens_per_day is not None and use.today.tokens >= limits.tokens_per_day:
                what = f"{limits.tokens_per_day} tokens per day (UTC)"
                self._refuse(use, caller, what, self._day_left(use), SPENT)
        use.window_requests += 1
        use.requests += 1
        self._touched(caller, use).requests += 1

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """Counts a call while it runs. Raises APIError (429)."""
        use = self._current(caller.key_id)
        limit = self.limits_of(caller).running
        if caller.key_id and use.running >= limit:
            self._refuse(use, caller, f"{limit} calls at the same time", _RETRY_RUNNING_S)
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def spend(self, caller: Caller, tokens: int) -> None:
        """Counts the tokens of a call that the backend has answered, whole or in part."""
        use = self._current(caller.key_id)
        use.window_tokens += tokens
        use.tokens += tokens
        self._touched(caller, use).tokens += tokens

    def by_key(self) -> dict[str, KeyUse]:
        """The usage since the start, by key id; "" for calls without a key."""
        return dict(self._by_key)

    def of_key(self, key_id: str) -> KeyUse:
        """A copy of the usage of one key now."""
        use = self._by_key.get(key_id)
        if use is None:
            return KeyUse(self._clock(), DayUse(self.day, key_id))
        copy = dataclasses.replace(use, today=dataclasses.replace(use.today))
        self._move_on(key_id, copy)
        return copy

    def tokens_left(self, key_id: str, limits: KeyLimits) -> int | None:
        """The tokens that are left of a key's budget of the day; None without a budget."""
        if limits.tokens_per_day is None:
            return None
        return max(0, limits.tokens_per_day - self.of_key(key_id).today.tokens)

    def restore(self, days: Iterable[DayUse]) -> None:
        """Takes over the counts of the current day that an earlier process saved."""
        for each in days:
            if each.day >= self.day:
                self._by_key[each.key_id] = KeyUse(self._clock(), each)

    def unsaved(self) -> list[DayUse]:
        """Returns copies of the counts that have changed since the last call, to be saved."""
        changed = [dataclasses.replace(each) for each in self._unsaved.values()]
        self._unsaved.clear()
        return changed

    def save_again(self, days: Iterable[DayUse]) -> None:
        """Takes back counts that could not be saved; those that have changed since are newer."""
        for each in days:
            use = self._by_key.get(each.key_id)
            newest = use.today if use is not None and use.today.day == each.day else each
            self._unsaved.setdefault((each.day, each.key_id), newest)

    @property
    def _date(self) -> date:
        return datetime.fromtimestamp(self._wall_clock(), UTC).date()

    def _current(self, key_id: str) -> KeyUse:
        use = self._by_key.get(key_id)
        if use is None:
            use = self._by_key[key_id] = KeyUse(self._clock(), DayUse(self.day, key_id))
        self._by_key.move_to_end(key_id)
        self._move_on(key_id, use)
        if len(self._by_key) > _MAX_KEYS:
            oldest = next(iter(self._by_key))
            if not self._by_key[oldest].running and self._by_key[oldest].today.day < self.day:
                del self._by_key[oldest]
        return use

    def _move_on(self, key_id: str, use: KeyUse) -> None:
        """Begins a new window and a new day once they are due. A clock that steps back begins none."""
        now, today = self._clock(), self.day
        if now - use.window_began >= WINDOW_S:
            use.window_began, use.window_requests, use.window_tokens = now, 0, 0
        if today > use.today.day:
            use.today = DayUse(today, key_id)

    def _touched(self, caller: Caller, use: KeyUse) -> DayUse:
        self._unsaved[use.today.day, caller.key_id] = use.today
        return use.today

    def _window_left(self, use: KeyUse) -> int:
        return max(1, round(use.window_began + WINDOW_S - self._clock()))

    def _day_left(self, use: KeyUse) -> int:
        ends = datetime.fromisoformat(use.today.day).replace(tzinfo=UTC) + timedelta(days=1)
        return max(1, round(ends.timestamp() - self._wall_clock()))

    def _refuse(
        self, use: KeyUse, caller: Caller, limit: str, retry_after_s: int, kind: str = "rate_limit_error"
    ) -> None:
        use.refused += 1
        self._touched(caller, use).refused += 1
        raise APIError(
            429,
            f"this key has reached its limit of {limit}: try again in {retry_after_s} s",
            kind,
            retry_after_s=retry_after_s,
        )
