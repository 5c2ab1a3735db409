"""The metrics of a worker."""

from tentalis.service.metrics import LONG_SECONDS, Metric, MetricKind

WORKER_TASKS = Metric(
    "tentalis_worker_tasks_total",
    MetricKind.COUNTER,
    "Tasks answered: ok; or at least one sample failed, or has no answer because the infrastructure failed (infra).",
    ("worker",),
    ("status",),
    "tasks",
)
WORKER_SAMPLES = Metric(
    "tentalis_worker_samples_total",
    MetricKind.COUNTER,
    "Results written, by status.",
    ("worker",),
    ("status",),
    "samples",
)
WORKER_TOKENS = Metric(
    "tentalis_worker_tokens_total", MetricKind.COUNTER, "Tokens of the responses written.", ("worker",), unit="tokens"
)
WORKER_SECONDS = Metric(
    "tentalis_worker_generation_seconds",
    MetricKind.HISTOGRAM,
    "Time from taking a task until its results are complete, including waits for a server.",
    ("worker",),
    unit="seconds",
    buckets=LONG_SECONDS,
)
WORKER_RUNNING = Metric(
    "tentalis_worker_running_tasks", MetricKind.GAUGE, "Tasks being answered.", ("worker",), unit="tasks"
)
WORKER_HELD = Metric(
    "tentalis_worker_held_tasks",
    MetricKind.GAUGE,
    "Tasks of a run that wait because the trainer would drop their answers.",
    ("worker",),
    unit="tasks",
)
WORKER_QUEUED = Metric(
    "tentalis_worker_queued_tasks", MetricKind.GAUGE, "Tasks fetched but not started.", ("worker",), unit="tasks"
)
