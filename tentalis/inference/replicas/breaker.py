"""The circuit breaker of one replica: closed, open after failures, half-open for one trial call. Pure."""

from collections.abc import Callable
from enum import StrEnum

FAILURES_TO_OPEN = 3
"""Failures in a row, of calls or probes, after which a replica is not asked any more."""
FIRST_OPEN_S, LONGEST_OPEN_S = 2.0, 60.0
"""Seconds until an open breaker allows a trial; each failed trial doubles them."""


class BreakerState(StrEnum):
    """closed: the replica is asked. open: it is not. half_open: it is asked once, to try it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Counts the failures of one replica. `clock`: seconds that only rise.

    Every call has an epoch, the value of `begin`. The outcome of a call of an earlier epoch is ignored: a call that
    began before the breaker opened says nothing about the replica now.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until: float | None = None
        self._open_s = FIRST_OPEN_S
        self._trial_running = False
        self._epoch = 0

    @property
    def state(self) -> BreakerState:
        """The state now; an open breaker becomes half-open by time alone."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    @property
    def open_until(self) -> float:
        """The time of the next trial; 0 if the breaker is closed."""
        return self._open_until or 0.0

    def allows(self) -> bool:
        """True if a call may begin now: the breaker is closed, or half-open without a trial under way."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial_running)

    def begin(self) -> int:
        """Begins a call, and returns its epoch. In the state half-open the call is the trial."""
        self._trial_running = self._trial_running or self.state is BreakerState.HALF_OPEN
        return self._epoch

    def succeeded(self, epoch: int) -> None:
        """A call has succeeded: closes the breaker."""
        if epoch == self._epoch:
            self._failures, self._open_until, self._open_s, self._trial_running = 0, None, FIRST_OPEN_S, False

    def failed(self, epoch: int) -> None:
        """A call has failed: opens the breaker after a failed trial, or after FAILURES_TO_OPEN failures in a row."""
        if epoch != self._epoch:
            return
        state = self.state
        self._failures += 1
        if state is BreakerState.HALF_OPEN:
            self._open(min(LONGEST_OPEN_S, 2 * self._open_s))
        elif state is BreakerState.CLOSED and self._failures >= FAILURES_TO_OPEN:
            self._open(FIRST_OPEN_S)

    def gave_up(self, epoch: int) -> None:
        """A call ended without an outcome, because its caller gave it up."""
        if epoch == self._epoch:
            self._trial_running = False

    def probed(self, answered: bool) -> None:
        """A probe has ended: an answer makes an open breaker half-open at once, silence counts as a failure."""
        if not answered:
            self.failed(self._epoch)
        elif self._open_until is not None:
            self._open_until = min(self._open_until, self._clock())

    def _open(self, seconds: float) -> None:
        self._epoch += 1
        self._open_s = seconds
        self._open_until = self._clock() + seconds
        self._trial_running = False
