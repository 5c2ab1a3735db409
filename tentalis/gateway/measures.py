"""What a gateway exports."""

import time
from collections.abc import Callable

from tentalis import metrics
from tentalis.metrics import Exporter


class Measures:
    """The metrics of a gateway. The callable counts the records on disk."""

    def __init__(self, spooled: Callable[[], int]) -> None:
        self.exporter = exporter = Exporter("gateway")
        self.calls = exporter.counter(metrics.GATEWAY_CALLS)
        self.seconds = exporter.histogram(metrics.GATEWAY_SECONDS)
        self.turns = exporter.counter(metrics.GATEWAY_TURNS)
        self.trainable = exporter.counter(metrics.GATEWAY_TRAINABLE)
        self.holds = exporter.counter(metrics.GATEWAY_HOLDS)
        self._recorded = exporter.counter(metrics.GATEWAY_RECORDED)
        exporter.read(metrics.GATEWAY_SPOOLED, spooled)

    def finished(self, path: str, began: float) -> None:
        """A call was answered in full."""
        self.calls.labels(path, "200").inc()
        self.seconds.labels(path).observe(time.monotonic() - began)

    def recorded(self, became: str, amount: int = 1) -> None:
        """What became of turns: log, spool, drained (from there to the log), lost (refused to the client), set_aside
        (in the spool, for a person), off."""
        self._recorded.labels(became).inc(amount)
