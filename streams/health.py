"""Health and metrics of a stream application on one port, and the watchdog that ends a worker which stands still."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from streams.delivery import Counts

log = logging.getLogger(__name__)

EXIT_STALLED = 4


class Metrics:
    """The metrics of one application: totals from `Counts`, gauges read when asked.

    Args:
        lag: records behind per (topic, partition).
        commit_age: seconds for which something acknowledged has waited for its commit, 0 if nothing does.
        ready: whether partitions are assigned and recovered.
    """

    def __init__(
        self,
        app_id: str,
        counts: Counts,
        *,
        lag: Callable[[], Mapping[tuple[str, int], int]],
        commit_age: Callable[[], float],
        ready: Callable[[], bool],
    ) -> None:
        self.registry = CollectorRegistry()
        self.recovery_seconds = 0.0
        self._app = app_id
        self._counts = counts
        self._lag = lag
        self._commit_age = commit_age
        self._ready = ready
        seconds = Histogram(
            "tentalis_stream_batch_seconds",
            "From a batch taken up to its effects confirmed.",
            ["app"],
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        )
        counts.batch_seconds = seconds.labels(app_id).observe
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Called by the registry."""
        totals = {
            "records": ("Records whose effects are confirmed.", self._counts.records),
            "outputs": ("Records produced and confirmed.", self._counts.outputs),
            "changes": ("State changes confirmed on the changelog.", self._counts.changes),
            "dead_letters": ("Records sent to a dead-letter topic.", self._counts.dead),
            "batches": ("Batches completed.", self._counts.batches),
            "retries": ("Batches tried again because something outside was away.", self._counts.retries),
        }
        for name, (text, value) in totals.items():
            counter = CounterMetricFamily(f"tentalis_stream_{name}", text, labels=["app"])
            counter.add_metric([self._app], value)
            yield counter
        gauges = {
            "ready": ("1 if partitions are assigned and recovered.", float(self._ready())),
            "commit_age_seconds": ("How long something acknowledged has waited for its commit.", self._commit_age()),
            "recovery_seconds": ("Duration of the last recovery.", self.recovery_seconds),
        }
        for name, (text, number) in gauges.items():
            gauge = GaugeMetricFamily(f"tentalis_stream_{name}", text, labels=["app"])
            gauge.add_metric([self._app], number)
            yield gauge
        lags = GaugeMetricFamily(
            "tentalis_stream_lag_records", "Records not yet acknowledged.", labels=["app", "topic", "partition"]
        )
        for (topic, partition), behind in self._lag().items():
            lags.add_metric([self._app, topic, str(partition)], behind)
        yield lags


async def serve(metrics: Metrics, ready: Callable[[], bool], host: str, port: int) -> web.AppRunner:
    """Serves /healthz (the event loop answers), /readyz (assigned and recovered) and /metrics until `cleanup()`.

    Raises:
        OSError: the port is taken.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if ready() else web.Response(text="not ready\n", status=503)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    site = web.Application()
    site.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    runner = web.AppRunner(site, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


class Watchdog:
    """Ends the process when nothing has moved for too long; a thread of its own, since the event loop may be what
    stands still.

    Args:
        counts: `progressed_at` says when something last moved.
        limit: seconds.
        end: what ends the process.
    """

    def __init__(self, app_id: str, counts: Counts, limit: float, end: Callable[[int], object] = os._exit) -> None:
        self._app = app_id
        self._counts = counts
        self._limit = limit
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._counts.progressed_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Watches no more."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            still = time.monotonic() - self._counts.progressed_at
            if still > self._limit:
                log.critical(
                    "%s has made no progress for %.0f s although there is something to do: ending with exit code %d. "
                    "The stacks of all threads follow",
                    self._app,
                    still,
                    EXIT_STALLED,
                )
                faulthandler.dump_traceback(sys.stderr)
                self._end(EXIT_STALLED)
                return
