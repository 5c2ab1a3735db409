"""The metrics of a gateway."""

import time
from collections.abc import Callable, Sequence

from tentalis.gateway.http.keys import Keys
from tentalis.gateway.http.usage import KeyUsage
from tentalis.inference.replicas.metrics import export_replicas
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.kafka.consumer import Lags
from tentalis.kafka.metrics import CONSUMER_LAG
from tentalis.service.metrics import LONG_SECONDS, Exporter, Metric, MetricKind

GATEWAY_CALLS = Metric(
    "tentalis_gateway_calls_total",
    MetricKind.COUNTER,
    "Calls forwarded to a backend, by path and status; broken: a stream that could not be completed.",
    ("gateway",),
    ("path", "status"),
    "calls",
)
GATEWAY_SECONDS = Metric(
    "tentalis_gateway_call_seconds",
    MetricKind.HISTOGRAM,
    "Time from the arrival of a call until its complete response, including the backend's time.",
    ("gateway",),
    ("path",),
    "seconds",
    buckets=LONG_SECONDS,
)
GATEWAY_TURNS = Metric(
    "tentalis_gateway_turns_total",
    MetricKind.COUNTER,
    "Turns by kind (main, side, episode), by the source of the kind and of the session (header, body, "
    "previous_response, default, heuristic, episode), "
    "and by the sign that a heuristic used.",
    ("gateway",),
    ("kind", "decided_by", "session_by", "sign"),
    "turns",
)
GATEWAY_TRAINABLE = Metric(
    "tentalis_gateway_trainable_total",
    MetricKind.COUNTER,
    "Turns recorded, by whether they can be trained on: yes or no. The record gives the reason.",
    ("gateway",),
    ("trainable",),
    "turns",
)
GATEWAY_RECORDED = Metric(
    "tentalis_gateway_recorded_total",
    MetricKind.COUNTER,
    "Turns by result: log, spool (on disk), drained (from the spool to the log), lost (refused to the client), "
    "set_aside (an unreadable file of the spool, kept there as *.damaged), off.",
    ("gateway",),
    ("became",),
    "turns",
)
GATEWAY_SPOOLED = Metric(
    "tentalis_gateway_spooled_turns",
    MetricKind.GAUGE,
    "Turns on disk that wait for the broker.",
    ("gateway",),
    unit="turns",
)
GATEWAY_HOLDS = Metric(
    "tentalis_gateway_holds_total",
    MetricKind.COUNTER,
    "Waits of calls for a backend that was loading new weights.",
    ("gateway",),
    unit="waits",
)


GATEWAY_FALLBACKS = Metric(
    "tentalis_gateway_fallbacks_total",
    MetricKind.COUNTER,
    "Calls to a policy that went to a fallback, because the backend before it could not answer.",
    ("gateway",),
    ("policy", "backend"),
    "calls",
)
GATEWAY_KEY_REQUESTS = Metric(
    "tentalis_gateway_key_requests_total",
    MetricKind.COUNTER,
    "Requests of each API key by result: admitted, or refused because of a limit. The label is the key's id.",
    ("gateway",),
    ("key", "result"),
    "requests",
)
GATEWAY_KEY_TOKENS = Metric(
    "tentalis_gateway_key_tokens_total",
    MetricKind.COUNTER,
    "Tokens of the prompts and answers of each API key. The label is the key's id.",
    ("gateway",),
    ("key",),
    "tokens",
)
GATEWAY_KEY_TOKENS_LEFT = Metric(
    "tentalis_gateway_key_tokens_left",
    MetricKind.GAUGE,
    "Tokens that are left of the budget of the UTC day of each API key that has one. The label is the key's id.",
    ("gateway",),
    ("key",),
    "tokens",
)


class GatewayMetrics:
    """Registers and updates a gateway's metrics. `spooled`: counts the records on disk. `lag`: the records behind.
    `routers`: of its backends."""

    def __init__(
        self, spooled: Callable[[], int], lag: Callable[[], Lags] = dict, routers: Sequence[ReplicaRouter] = ()
    ) -> None:
        self.exporter = exporter = Exporter("gateway")
        self.calls = exporter.counter(GATEWAY_CALLS)
        self.seconds = exporter.histogram(GATEWAY_SECONDS)
        self.turns = exporter.counter(GATEWAY_TURNS)
        self.trainable = exporter.counter(GATEWAY_TRAINABLE)
        self.holds = exporter.counter(GATEWAY_HOLDS)
        self.fallbacks = exporter.counter(GATEWAY_FALLBACKS)
        self._recorded = exporter.counter(GATEWAY_RECORDED)
        exporter.read(GATEWAY_SPOOLED, spooled)
        exporter.read(CONSUMER_LAG, lag)
        export_replicas(exporter, routers)

    def watch_keys(self, usage: KeyUsage, keys: Keys) -> None:
        """Registers the usage of the API keys."""
        self.exporter.read(GATEWAY_KEY_TOKENS, lambda: {(key,): use.tokens for key, use in usage.by_key().items()})
        self.exporter.read(GATEWAY_KEY_TOKENS_LEFT, lambda: _tokens_left(usage, keys))
        self.exporter.read(
            GATEWAY_KEY_REQUESTS,
            lambda: {
                (key, result): count
                for key, use in usage.by_key().items()
                for result, count in (("admitted", use.requests), ("refused", use.refused))
            },
        )

    def call_finished(self, path: str, started: float) -> None:
        """Counts a call that was answered in full."""
        self.calls.labels(path, "200").inc()
        self.seconds.labels(path).observe(time.monotonic() - started)

    def recorded(self, result: str, amount: int = 1) -> None:
        """Counts turns by result: log, spool, drained (from the spool to the log), lost (refused to the client),
        set_aside (kept in the spool for manual inspection), off (not recorded at the client's request)."""
        self._recorded.labels(result).inc(amount)


def _tokens_left(usage: KeyUsage, keys: Keys) -> dict[tuple[str, ...], float]:
    left = {key.id: usage.tokens_left(key.id, usage.limits.replaced_by(key.limits)) for key in keys.listed}
    return {(key_id,): tokens for key_id, tokens in left.items() if tokens is not None}
