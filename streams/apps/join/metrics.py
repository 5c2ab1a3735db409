"""The metrics of the join."""

from tentalis.service.metrics import Metric, MetricKind

JOIN_OPEN = Metric("tentalis_join_open_tasks", MetricKind.GAUGE, "Tasks that wait for halves.", ("join",), unit="tasks")
JOIN_OPEN_BYTES = Metric(
    "tentalis_join_open_bytes",
    MetricKind.GAUGE,
    "Bytes of the halves of open tasks.",
    ("join",),
    unit="bytes",
)
JOIN_PAUSED = Metric(
    "tentalis_join_paused_partitions",
    MetricKind.GAUGE,
    "Partitions that are paused because too much is open; all partitions once the bound is reached.",
    ("join",),
    unit="partitions",
)
JOIN_OLDEST = Metric(
    "tentalis_join_oldest_open_seconds",
    MetricKind.GAUGE,
    "Age of the oldest open task, in stream time.",
    ("join",),
    unit="seconds",
)
JOIN_REMEMBERED = Metric(
    "tentalis_join_remembered_tasks",
    MetricKind.GAUGE,
    "Closed tasks that are still remembered.",
    ("join",),
    unit="tasks",
)
JOIN_TIME = Metric(
    "tentalis_join_stream_timestamp_seconds",
    MetricKind.GAUGE,
    "Stream time since the epoch: the newest append time processed.",
    ("join",),
    ("partition",),
    "seconds",
)
JOIN_OUTCOMES = Metric(
    "tentalis_join_outcomes_total",
    MetricKind.COUNTER,
    "Outcomes by kind: rl, opd, both (joined), empty, failed, expired, late, superseded.",
    ("join",),
    ("kind",),
    "samples",
)
JOIN_ROLLOUTS = Metric(
    "tentalis_join_rollouts_total", MetricKind.COUNTER, "Rollouts emitted.", ("join",), unit="records"
)
JOIN_GIVEN_UP = Metric(
    "tentalis_join_timeouts_total",
    MetricKind.COUNTER,
    "Waits that timed out: for the hint of a sample (hint), for a whole group (deadline).",
    ("join",),
    ("wait",),
    "waits",
)
JOIN_DUPLICATES = Metric(
    "tentalis_join_duplicates_total",
    MetricKind.COUNTER,
    "Duplicate halves on the log, or delivered again, which changed nothing.",
    ("join",),
    unit="records",
)
