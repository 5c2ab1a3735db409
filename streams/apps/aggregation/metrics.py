"""The metrics of the aggregation."""

from tentalis.service.metrics import Metric, MetricKind

AGGREGATION_BARE = Metric(
    "tentalis_aggregation_bare_feedback_total",
    MetricKind.COUNTER,
    "Grades that count in no window because they came without their result.",
    ("aggregation",),
    unit="records",
)
AGGREGATION_LATE = Metric(
    "tentalis_aggregation_late_total",
    MetricKind.COUNTER,
    "Records that came after their window was closed.",
    ("aggregation",),
    unit="records",
)
AGGREGATION_DUPLICATES = Metric(
    "tentalis_aggregation_duplicates_total",
    MetricKind.COUNTER,
    "Records whose event had already been counted.",
    ("aggregation",),
    unit="records",
)
