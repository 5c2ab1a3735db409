"""The metrics of a pool of environments."""

from tentalis.agents.pool.leases import LeasePool
from tentalis.service.metrics import LONG_SECONDS, Exporter, Metric, MetricKind

_BY = ("env-pool",)
POOL_PLACES = Metric("tentalis_env_pool_places", MetricKind.GAUGE, "Leases that the pool gives at most.", _BY)
POOL_LEASES = Metric("tentalis_env_pool_leases", MetricKind.GAUGE, "Leases that are held.", _BY)
POOL_ENDING = Metric(
    "tentalis_env_pool_ending",
    MetricKind.GAUGE,
    "Ended leases whose episodes are being closed. They take a place.",
    _BY,
)
POOL_ALLOCATIONS = Metric(
    "tentalis_env_pool_allocations_total",
    MetricKind.COUNTER,
    "Allocations, by outcome: new, reused, or full (refused).",
    _BY,
    ("outcome",),
    "allocations",
)
POOL_EXPIRED = Metric(
    "tentalis_env_pool_expired_total", MetricKind.COUNTER, "Leases that ended without a heartbeat.", _BY, unit="leases"
)
POOL_FAULTS = Metric(
    "tentalis_env_pool_faults_total", MetricKind.COUNTER, "Calls in which an environment failed.", _BY, unit="calls"
)
POOL_REQUESTS = Metric(
    "tentalis_env_pool_requests_total",
    MetricKind.COUNTER,
    "Answered calls, by path and HTTP status.",
    _BY,
    ("path", "status"),
    "requests",
)
POOL_SECONDS = Metric(
    "tentalis_env_pool_request_seconds",
    MetricKind.HISTOGRAM,
    "Time of a call.",
    _BY,
    ("path",),
    "seconds",
    LONG_SECONDS,
)


class PoolMetrics:
    """The metrics of the process. `requests` and `seconds` are those of calls."""

    def __init__(self, pool: LeasePool) -> None:
        self.exporter = exporter = Exporter("env-pool")
        self.requests = exporter.counter(POOL_REQUESTS)
        self.seconds = exporter.histogram(POOL_SECONDS)
        exporter.read(POOL_PLACES, lambda: pool.limits.places)
        exporter.read(POOL_LEASES, lambda: pool.held)
        exporter.read(POOL_ENDING, lambda: pool.ending)
        exporter.read(POOL_ALLOCATIONS, lambda: {(name,): count for name, count in pool.counts.allocations.items()})
        exporter.read(POOL_EXPIRED, lambda: pool.counts.expired)
        exporter.read(POOL_FAULTS, lambda: pool.counts.faults)
