"""The metrics of all stream applications."""

from typing import Any

from tentalis.service.metrics import SECONDS, Metric, MetricKind

STREAMS = ("stream applications",)
"""`Metric.by` of a metric that all stream applications export; tentalis.kafka.topology has their names."""
"""The stream applications, as `Metric.by` names them."""


def _stream(name: str, kind: MetricKind, text: str, unit: str, *labels: str, **more: Any) -> Metric:
    return Metric(f"tentalis_stream_{name}", kind, text, STREAMS, ("app", *labels), unit, **more)


STREAM_RECORDS = _stream(
    "records_total", MetricKind.COUNTER, "Records processed, with all effects confirmed.", "records"
)
STREAM_OUTPUTS = _stream("outputs_total", MetricKind.COUNTER, "Records produced and confirmed.", "records")
STREAM_CHANGES = _stream("changes_total", MetricKind.COUNTER, "State changes confirmed on the changelog.", "records")
STREAM_CHANGE_BYTES = _stream(
    "change_bytes_total", MetricKind.COUNTER, "Bytes of the state changes confirmed on the changelog.", "bytes"
)
STREAM_DEAD = _stream("dead_letters_total", MetricKind.COUNTER, "Records sent to a dead-letter topic.", "records")
STREAM_BATCHES = _stream("batches_total", MetricKind.COUNTER, "Batches completed.", "batches")
STREAM_RETRIES = _stream(
    "retries_total", MetricKind.COUNTER, "Batches retried because an external service was unavailable.", "batches"
)
STREAM_BATCH_SECONDS = _stream(
    "batch_seconds",
    MetricKind.HISTOGRAM,
    "Time from the start of a batch until its effects are confirmed.",
    "seconds",
    buckets=SECONDS,
)
STREAM_STEP_SECONDS = _stream(
    "step_seconds_total", MetricKind.COUNTER, "Time spent in the application's own step, including decoding.", "seconds"
)
STREAM_FLUSH_SECONDS = _stream(
    "flush_seconds_total", MetricKind.COUNTER, "Time spent until outputs and state changes were confirmed.", "seconds"
)
STREAM_DECODE_SECONDS = _stream("decode_seconds_total", MetricKind.COUNTER, "Time spent decoding records.", "seconds")
STREAM_COMMIT_AGE = _stream(
    "commit_age_seconds",
    MetricKind.GAUGE,
    "Time that an acknowledged offset has waited for its commit; 0 if none waits.",
    "seconds",
)
STREAM_RECOVERY = _stream("recovery_seconds", MetricKind.GAUGE, "Duration of the last recovery.", "seconds")
STREAM_RECOVERED = _stream(
    "recovered_records", MetricKind.GAUGE, "Changelog records read by the last recovery.", "records"
)
STREAM_STATE_BYTES = _stream(
    "state_disk_bytes", MetricKind.GAUGE, "State on disk; 0 if the state is in memory.", "bytes"
)
STREAM_STATE_MEMORY = _stream(
    "state_buffers_bytes",
    MetricKind.GAUGE,
    "Memory of RocksDB's block cache and write buffers, which is bounded; 0 if the state is in memory.",
    "bytes",
)
STREAM_WAITING = _stream(
    "waiting_partitions",
    MetricKind.GAUGE,
    "Partitions that wait for an external service (a model server), or are paused because too much is open.",
    "partitions",
)
STREAM_LAG = _stream(
    "lag_records",
    MetricKind.GAUGE,
    "Records not yet acknowledged, up to the end offset of the last fetch or of a query to the broker within the "
    "last half minute.",
    "records",
    "topic",
    "partition",
)
SKIPPED = Metric(
    "tentalis_stream_skipped_total",
    MetricKind.COUNTER,
    "Records skipped because another application dead-letters them.",
    ("scoring", "experience", "aggregation"),
    ("app",),
    "records",
)
