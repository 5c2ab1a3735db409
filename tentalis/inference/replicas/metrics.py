"""The metrics of a client of several replicas."""

from collections.abc import Sequence

from tentalis.inference.replicas.breaker import BreakerState
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.service.metrics import Exporter, Metric, MetricKind

_BY = ("experience", "gateway", "hinting", "policies", "worker")
REPLICA_CALLS = Metric(
    "tentalis_replica_calls_total",
    MetricKind.COUNTER,
    "Calls of a replica of a model server: ok; failed; missing: it had not the version; given_up: the caller did not "
    "wait for the end. Only a gateway exports series of a single replica.",
    _BY,
    ("replica", "outcome"),
    "calls",
)
REPLICA_REPEATS = Metric(
    "tentalis_replica_repeated_calls_total",
    MetricKind.COUNTER,
    "Calls that went to a second replica: the first failed, had not the version (missing), or was slow (hedge).",
    _BY,
    ("reason",),
    "calls",
)
REPLICA_STATE = Metric(
    "tentalis_replica_state",
    MetricKind.GAUGE,
    "1 for the present state of a replica's circuit breaker: closed, open, half_open.",
    _BY,
    ("replica", "state"),
)
REPLICA_RUNNING = Metric(
    "tentalis_replica_running_calls", MetricKind.GAUGE, "Calls in flight at a replica.", _BY, ("replica",), "calls"
)


def export_replicas(exporter: Exporter, routers: Sequence[ReplicaRouter]) -> None:
    """Registers the metrics of these routers."""
    exporter.read(
        REPLICA_CALLS,
        lambda: {
            (url, outcome.value): count for router in routers for (url, outcome), count in list(router.outcomes.items())
        },
    )
    exporter.read(REPLICA_REPEATS, lambda: _repeats(routers))
    exporter.read(
        REPLICA_STATE,
        lambda: {
            (url, state.value): float(health.state is state)
            for router in routers
            for url, health in router.health().items()
            for state in BreakerState
        },
    )
    exporter.read(
        REPLICA_RUNNING,
        lambda: {(url,): health.in_flight for router in routers for url, health in router.health().items()},
    )


def _repeats(routers: Sequence[ReplicaRouter]) -> dict[tuple[str, ...], float]:
    total: dict[tuple[str, ...], float] = {}
    for router in routers:
        for reason, count in list(router.repeats.items()):
            total[(reason.value,)] = total.get((reason.value,), 0.0) + count
    return total
