"""The metrics of pairing feedback with results."""

from tentalis.service.metrics import Metric, MetricKind

PAIRING_WAITING = Metric(
    "tentalis_pairing_waiting_feedback",
    MetricKind.GAUGE,
    "Feedback without its result that waits for it.",
    ("scoring", "hinting"),
    ("app",),
    "records",
)
PAIRING_REMEMBERED = Metric(
    "tentalis_pairing_remembered_results",
    MetricKind.GAUGE,
    "Results with which later feedback can be paired.",
    ("scoring", "hinting"),
    ("app",),
    "records",
)
