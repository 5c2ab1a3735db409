"""The metric of processes that read topics themselves. Those of the stream applications are in streams/runtime."""

from tentalis.service.metrics import Metric, MetricKind

CONSUMER_LAG = Metric(
    "tentalis_consumer_lag_records",
    MetricKind.GAUGE,
    "Records between the last one read and the end of the partition, as of its last fetch.",
    ("worker", "policies", "gateway"),
    ("topic", "partition"),
    "records",
)
