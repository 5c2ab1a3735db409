"""When more rollouts would only be thrown away, and how long that is said. Pure.

A rollout that is sampled now is used after the full batches that wait already, each of which is a step: it is then
`ahead + waiting` steps old, where `ahead` is how far the trained version is beyond the served one. Over `max_staleness`
the planner drops it.
"""

from dataclasses import dataclass

from schemas.records import BackPressure

# Said again three times in the time that it holds: a trainer that died keeps nobody waiting for longer.
HOLDS_MS = 60_000
REFRESHES = 3


@dataclass(slots=True)
class Valve:
    """What was said last; `closed` None: nothing yet."""

    policy: str
    run_id: str
    max_staleness: int
    closed: bool | None = None
    _said_ms: int = 0
    _holds_ms: int = HOLDS_MS

    def stepped(self, seconds: float) -> None:
        """How long the last step took. Nothing is said within one, so what is said between two must outlast it."""
        self._holds_ms = max(HOLDS_MS, round(2000 * seconds))

    def due(self, waiting: int, ahead: int, now_ms: int) -> BackPressure | None:
        """What to say now, given the full batches that wait and the steps that the trainer is ahead of what is served,
        or None. The first word is said in any case, for a predecessor's may still hold; while it is open nothing is
        repeated."""
        closed = ahead + waiting > self.max_staleness
        changed = closed != self.closed
        if not changed and not (closed and now_ms - self._said_ms >= self._holds_ms // REFRESHES):
            return None
        self.closed, self._said_ms = closed, now_ms
        would = f"what is sampled now would be {ahead + waiting} steps old, the limit is {self.max_staleness}"
        return BackPressure(
            policy=self.policy,
            run_id=self.run_id,
            event_time=now_ms,
            closed=closed,
            waiting=waiting,
            ahead=ahead,
            max_staleness=self.max_staleness,
            expires_at=now_ms + (self._holds_ms if closed else 0),
            reason=would if closed else "",
        )
