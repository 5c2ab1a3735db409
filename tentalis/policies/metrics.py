"""The metrics of the policies process."""

from tentalis.service.metrics import SECONDS, Metric, MetricKind

POLICIES_SERVED = Metric(
    "tentalis_policies_served_version", MetricKind.GAUGE, "Version that the server serves.", ("policies",), ("policy",)
)
POLICIES_PROMOTED = Metric(
    "tentalis_policies_promoted_version", MetricKind.GAUGE, "Version that should be served.", ("policies",), ("policy",)
)
POLICIES_ACKS = Metric(
    "tentalis_policies_acknowledgements_total",
    MetricKind.COUNTER,
    "Acknowledgements written: of a version that is served (ok), or that must not be served (refused).",
    ("policies",),
    ("result",),
    "records",
)
POLICIES_VERDICTS = Metric(
    "tentalis_policies_verdicts_total",
    MetricKind.COUNTER,
    "Verdicts of the guard, on candidates and on served versions: passed or refused.",
    ("policies",),
    ("result",),
    "records",
)
POLICIES_SWAP = Metric(
    "tentalis_policies_swap_seconds",
    MetricKind.HISTOGRAM,
    "Time to check the hash, load the adapter and compare the canary.",
    ("policies",),
    unit="seconds",
    buckets=SECONDS,
)
POLICIES_CANARY = Metric(
    "tentalis_policies_canary_difference",
    MetricKind.GAUGE,
    "Largest difference between the last canary's log-probs and the trainer's.",
    ("policies",),
    unit="nats",
)
POLICIES_REPLICA_UP = Metric(
    "tentalis_policies_replica_up",
    MetricKind.GAUGE,
    "1 if this replica of the inference server answered its last request.",
    ("policies",),
    ("replica",),
)
POLICIES_SERVER_UP = Metric(
    "tentalis_policies_server_up",
    MetricKind.GAUGE,
    "1 if the inference server answered the last request.",
    ("policies",),
)
