"""Metric definitions, the exporter that serves them, and the metrics of every process.

All other metrics are defined in the `metrics.py` of what they measure; `tentalis.cli.shared.metrics_page` lists these
modules and writes docs/reference/metrics.md from them. Each process that a metric names in `by` exports it through its
`Exporter`. Units are base units (seconds, bytes); counters end in `_total`; a label has few values, never the id of a
task, rollout or session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tentalis.service.version import app_version

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram


class MetricKind(StrEnum):
    """The Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


EVERY_PROCESS: tuple[str, ...] = ()
"""`Metric.by` of a metric that all processes export."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its full name, its type, its help text, the processes that export it, and its label names.

    Example: Metric("tentalis_worker_tasks_total", MetricKind.COUNTER, "Tasks answered.", ("worker",), unit="tasks")
    """

    name: str
    kind: MetricKind
    help: str
    by: tuple[str, ...]
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


READY = Metric("tentalis_ready", MetricKind.GAUGE, "1 if the process is ready (/readyz).", EVERY_PROCESS)
BUILD_INFO = Metric(
    "tentalis_build_info", MetricKind.GAUGE, "Always 1, labelled with the running version.", EVERY_PROCESS, ("version",)
)
PROCESS_METRICS = (
    Metric(
        "process_cpu_seconds_total",
        MetricKind.COUNTER,
        "Total user and system CPU time spent in seconds.",
        EVERY_PROCESS,
        unit="seconds",
    ),
    Metric(
        "process_resident_memory_bytes", MetricKind.GAUGE, "Resident memory size in bytes.", EVERY_PROCESS, unit="bytes"
    ),
    Metric(
        "process_virtual_memory_bytes", MetricKind.GAUGE, "Virtual memory size in bytes.", EVERY_PROCESS, unit="bytes"
    ),
    Metric(
        "process_start_time_seconds",
        MetricKind.GAUGE,
        "Start time of the process since unix epoch in seconds.",
        EVERY_PROCESS,
        unit="seconds",
    ),
    Metric("process_open_fds", MetricKind.GAUGE, "Number of open file descriptors.", EVERY_PROCESS, unit="descriptors"),
    Metric(
        "process_max_fds",
        MetricKind.GAUGE,
        "Maximum number of open file descriptors.",
        EVERY_PROCESS,
        unit="descriptors",
    ),
)

Values = float | Mapping[tuple[str, ...], float]
"""A value, or one value per combination of labels."""


class Exporter:
    """The metrics of one process.

    The process updates a metric itself (`counter`, `gauge`, `histogram`), or registers a callable that returns the
    value at each scrape (`read`).

    Args:
        process: the name of the process, as in `Metric.by`.
        constant: labels with the same value in all series. They come first in a metric's labels.
    """

    def __init__(self, process: str, **constant: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

        # Otherwise each counter has a second series, with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.process = process
        self.registry = CollectorRegistry()
        self.bound: set[Metric] = set(PROCESS_METRICS)
        self._constant = constant
        self._readers: list[tuple[Metric, Callable[[], Values]]] = []
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self.read(BUILD_INFO, lambda: {(app_version(),): 1.0})

    def counter(self, metric: Metric) -> Counter:
        """Registers a counter and returns it. The process increments it."""
        from prometheus_client import Counter

        return self._own(metric, MetricKind.COUNTER, Counter)  # type: ignore[no-any-return]

    def gauge(self, metric: Metric) -> Gauge:
        """Registers a gauge and returns it. The process sets it."""
        from prometheus_client import Gauge

        return self._own(metric, MetricKind.GAUGE, Gauge)  # type: ignore[no-any-return]

    def histogram(self, metric: Metric) -> Histogram:
        """Registers a histogram and returns it. The process observes values with it."""
        from prometheus_client import Histogram

        return self._own(metric, MetricKind.HISTOGRAM, Histogram, buckets=metric.buckets)  # type: ignore[no-any-return]

    def read(self, metric: Metric, value: Callable[[], Values]) -> None:
        """Registers a counter or gauge. `value` is called at each scrape, on the thread that serves it."""
        self._bind(metric)
        self._readers.append((metric, value))

    def exposition(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yields the registered metrics with their values. The registry calls it at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, read in self._readers:
            family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
            series = family(metric.name, metric.help, labels=metric.labels)
            values = read()
            for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
                series.add_metric([*self._given(metric), *labels], value)
            yield series

    def _given(self, metric: Metric) -> list[str]:
        return [self._constant[label] for label in metric.labels if label in self._constant]

    def _own(self, metric: Metric, kind: MetricKind, make: Callable[..., Any], **more: Any) -> Any:
        if metric.kind is not kind:
            raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")
        self._bind(metric)
        made = make(metric.name, metric.help, metric.labels, registry=self.registry, **more)
        given = self._given(metric)
        return made.labels(*given) if given and len(given) == len(metric.labels) else made

    def _bind(self, metric: Metric) -> None:
        if metric in self.bound:
            raise ValueError(f"{metric.name} is exported twice by {self.process}")
        self.bound.add(metric)
