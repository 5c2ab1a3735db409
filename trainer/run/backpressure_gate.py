"""Backpressure: when more rollouts would only be dropped as stale, and how long the signal holds. Pure.

A rollout that is sampled now is used after the full batches that already wait, each of which is a step: it is then
`ahead + waiting` steps old, where `ahead` is the distance of the trained version to the served one. Above
`max_staleness` the planner drops it. For a rollout of the trained version itself, a candidate that is not served yet,
`ahead` is 0.
"""

from dataclasses import dataclass

from schemas.records import BackPressure

# The signal expires, so a dead trainer blocks no manager for longer; it is repeated three times within that time.
EXPIRY_MS = 60_000
REFRESHES_PER_EXPIRY = 3


@dataclass(slots=True)
class BackpressureGate:
    """The state of the backpressure signal. `closed`: the last published value; None before the first."""

    policy: str
    run_id: str
    max_staleness: int
    closed: bool | None = None
    _closed_for_candidate: bool = False
    _published_ms: int = 0
    _expiry_ms: int = EXPIRY_MS

    def set_step_duration(self, seconds: float) -> None:
        """Sets the duration of the last step. Nothing is published during a step, so a signal must outlast the next
        one."""
        self._expiry_ms = max(EXPIRY_MS, round(2000 * seconds))

    def due_signal(self, waiting: int, ahead: int, now_ms: int) -> BackPressure | None:
        """Returns the signal to publish now, or None. Inputs: the full batches that wait, and the steps that the
        trainer is ahead of the served version. The first signal is always published, because a predecessor's may still
        hold; while open, nothing is repeated."""
        closed, for_candidate = ahead + waiting > self.max_staleness, waiting > self.max_staleness
        changed = (closed, for_candidate) != (self.closed, self._closed_for_candidate)
        if not changed and not (closed and now_ms - self._published_ms >= self._expiry_ms // REFRESHES_PER_EXPIRY):
            return None
        self.closed, self._closed_for_candidate, self._published_ms = closed, for_candidate, now_ms
        reason = f"a rollout sampled now would be {ahead + waiting} steps old, the limit is {self.max_staleness}"
        return BackPressure(
            policy=self.policy,
            run_id=self.run_id,
            event_time=now_ms,
            closed=closed,
            waiting=waiting,
            ahead=ahead,
            max_staleness=self.max_staleness,
            expires_at=now_ms + (self._expiry_ms if closed else 0),
            reason=reason if closed else "",
        )
