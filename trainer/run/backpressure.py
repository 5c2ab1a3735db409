"""Checks for backpressure and publishes each change on the log (the decision: backpressure_gate.py)."""

import logging
import time
from dataclasses import dataclass

from schemas import topics
from tentalis.text.timestamps import now_ms
from trainer.data.plan import BatchPlanner
from trainer.run.backpressure_gate import BackpressureGate
from trainer.run.metrics import TrainerMetrics
from trainer.run.publish import TransactionalWriter

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
# Up to this many offers, waiting batches are counted on every change.
RECOUNT_OFFERS = 10_000


@dataclass(slots=True)
class BackpressureReporter:
    """The backpressure of one policy's trainer."""

    gate: BackpressureGate
    writer: TransactionalWriter
    metrics: TrainerMetrics
    _checked_at: float = 0.0
    _last_inputs: tuple[int, int, int] = (-1, 0, 0)

    def update(self, planner: BatchPlanner, step: int, version: int, ahead: int) -> None:
        """Publishes backpressure if it changed. `version`: the version that the next step trains; `ahead`: its distance
        in steps to the served version."""
        now, inputs = time.monotonic(), (step, ahead, planner.pending)
        # Counting many waiting offers takes long.
        if now - self._checked_at < CHECK_SECONDS and (inputs == self._last_inputs or planner.pending > RECOUNT_OFFERS):
            return
        self._checked_at, self._last_inputs = now, inputs
        self._publish(planner.count_full_batches(version), ahead)

    def release(self) -> None:
        """Opens the gate when the trainer ends, so that no manager waits for it."""
        self._publish(0, 0)

    def _publish(self, waiting: int, ahead: int) -> None:
        signal = self.gate.due_signal(waiting, ahead, now_ms())
        if signal is not None:
            self.writer.write(topics.POLICIES, signal)
            log.info("%s", f"backpressure on: {signal.reason}" if signal.closed else "backpressure off")
        self.metrics.set_backpressure(bool(self.gate.closed), waiting)
