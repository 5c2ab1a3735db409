"""Looks whether more rollouts would only be thrown away, and says so on the log where it changed (pressure.py)."""

import logging
import time
from dataclasses import dataclass

from schemas import topics
from tentalis.kafka import now_ms
from trainer.metrics import TrainerMetrics
from trainer.plan import Planner
from trainer.pressure import Valve
from trainer.publish import Ledger

log = logging.getLogger(__name__)

PRESS_SECONDS = 1.0
# Up to so many offers, what waits is counted whenever it changed.
QUICK_OFFERS = 10_000


@dataclass(slots=True)
class Press:
    """The back-pressure of one policy's trainer."""

    valve: Valve
    ledger: Ledger
    metrics: TrainerMetrics
    _pressed: float = 0.0
    _seen: tuple[int, int, int] = (-1, 0, 0)

    def look(self, planner: Planner, step: int, version: int, ahead: int) -> None:
        """Says, where it changed, whether more rollouts would only be thrown away. `version` is the one that the next
        step trains, `ahead` how many steps it is beyond what is served."""
        now, seen = time.monotonic(), (step, ahead, planner.pending)
        # To count what waits takes a while where much does.
        if now - self._pressed < PRESS_SECONDS and (seen == self._seen or planner.pending > QUICK_OFFERS):
            return
        self._pressed, self._seen = now, seen
        self._say(planner.waiting(version), ahead)

    def release(self) -> None:
        """The trainer ends, and nobody shall wait for it."""
        self._say(0, 0)

    def _say(self, waiting: int, ahead: int) -> None:
        said = self.valve.due(waiting, ahead, now_ms())
        if said is not None:
            self.ledger.write(topics.POLICIES, said)
            log.info("%s", f"no more rollouts: {said.reason}" if said.closed else "rollouts are welcome")
        self.metrics.pressed(bool(self.valve.closed), waiting)
