"""Limits per API key, and the usage that they are checked against. In memory: a restarted gateway starts from zero."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tentalis.gateway.http.errors import APIError

WINDOW_S = 60.0
_MAX_KEYS = 100_000
_RETRY_RUNNING_S = 1


class KeyLimits(BaseModel):
    """Limits of each API key; those on the content of a request also hold where no key is required.

    `requests_per_minute`, `tokens_per_minute` (prompt and answer): a fixed window. `running`: calls and streams at the
    same time. `choices`: answers per call (n times prompts). `messages`: messages per call. `stops`: stop strings per
    call. `event_streams`: open streams of /v1/events. `feedback_per_turn`: feedback records of a task,
    from all sources.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Annotated[int, Field(gt=0)] = 6000
    tokens_per_minute: Annotated[int, Field(gt=0)] = 10_000_000
    running: Annotated[int, Field(gt=0)] = 256
    choices: Annotated[int, Field(gt=0, le=1024)] = 64
    messages: Annotated[int, Field(gt=0, le=50_000)] = 10_000
    stops: Annotated[int, Field(gt=0, le=1024)] = 64
    event_streams: Annotated[int, Field(gt=0)] = 8
    feedback_per_turn: Annotated[int, Field(gt=0)] = 100


@dataclass(slots=True)
class KeyUse:
    """The usage of one key: in the current window, and in all since the start."""

    window_began: float
    window_requests: int = 0
    window_tokens: int = 0
    running: int = 0
    requests: int = 0
    tokens: int = 0
    refused: int = 0


class KeyUsage:
    """Counts the usage of each key and refuses what is over its limits. A caller without a key is counted, not limited:
    it is a program of this machine, or the operator has chosen to require no keys. Use it on the event loop only."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._by_key: OrderedDict[str, KeyUse] = OrderedDict()

    def admit(self, key_id: str) -> None:
        """Counts a request. Raises APIError (429)."""
        use = self._current(key_id)
        if key_id and use.window_requests >= self.limits.requests_per_minute:
            self._refuse(use, f"{self.limits.requests_per_minute} requests per minute", self._window_left(use))
        if key_id and use.window_tokens >= self.limits.tokens_per_minute:
            self._refuse(use, f"{self.limits.tokens_per_minute} tokens per minute", self._window_left(use))
        use.window_requests += 1
        use.requests += 1

    @contextmanager
    def running(self, key_id: str) -> Iterator[None]:
        """Counts a call while it runs. Raises APIError (429)."""
        use = self._current(key_id)
        if key_id and use.running >= self.limits.running:
            self._refuse(use, f"{self.limits.running} calls at the same time", _RETRY_RUNNING_S)
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def spend(self, key_id: str, tokens: int) -> None:
        """Counts the tokens of an answered call."""
        use = self._current(key_id)
        use.window_tokens += tokens
        use.tokens += tokens

    def by_key(self) -> dict[str, KeyUse]:
        """The usage since the start, by key id; "" for calls without a key."""
        return dict(self._by_key)

    def _current(self, key_id: str) -> KeyUse:
        now = self._clock()
        use = self._by_key.setdefault(key_id, KeyUse(now))
        self._by_key.move_to_end(key_id)
        if now - use.window_began >= WINDOW_S:
            use.window_began, use.window_requests, use.window_tokens = now, 0, 0
        if len(self._by_key) > _MAX_KEYS:
            oldest = next(iter(self._by_key))
            if not self._by_key[oldest].running:
                del self._by_key[oldest]
        return use

    def _window_left(self, use: KeyUse) -> int:
        return max(1, round(use.window_began + WINDOW_S - self._clock()))

    def _refuse(self, use: KeyUse, limit: str, retry_after_s: int) -> None:
        use.refused += 1
        raise APIError(
            429,
            f"this key has reached its limit of {limit}: try again later",
            "rate_limit_error",
            retry_after_s=retry_after_s,
        )
