"""Health and metrics of a stream application on one port, and the watchdog that ends a stalled worker."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from aiohttp import web

from schemas.topics import PREFIX
from streams.runtime import metrics
from streams.runtime.delivery import DeliveryCounts
from streams.runtime.processor import Processor
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health
from tentalis.service.metrics import Exporter

log = logging.getLogger(__name__)


@runtime_checkable
class Measured(Protocol):
    """A processor with additional metrics."""

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics. Called once; the metrics are read on the event loop, between two batches."""


class Metrics:
    """The metrics of one application: `DeliveryCounts`, gauges, and the processor's own, all read at each scrape.

    Args:
        lag: records behind per (topic, partition).
        commit_age: seconds for which an acknowledged offset has waited for its commit, 0 if none does.
        waiting: number of partitions that wait for an external service.
        state_bytes: bytes of state on disk.
        state_memory: bytes that the databases on disk hold in memory.
    """

    def __init__(
        self,
        processor: Processor,
        counts: DeliveryCounts,
        *,
        lag: Callable[[], Mapping[tuple[str, int], int]],
        commit_age: Callable[[], float],
        waiting: Callable[[], int],
        state_bytes: Callable[[], int] = lambda: 0,
        state_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        self.recovery_seconds = 0.0
        self.recovered = 0
        self.exporter = exporter = Exporter(processor.app_id.removeprefix(f"{PREFIX}-"), app=processor.app_id)
        counts.batch_seconds = exporter.histogram(metrics.STREAM_BATCH_SECONDS).observe
        exporter.read(metrics.STREAM_RECORDS, lambda: counts.records)
        exporter.read(metrics.STREAM_OUTPUTS, lambda: counts.outputs)
        exporter.read(metrics.STREAM_CHANGES, lambda: counts.changes)
        exporter.read(metrics.STREAM_CHANGE_BYTES, lambda: counts.change_bytes)
        exporter.read(metrics.STREAM_DEAD, lambda: counts.dead)
        exporter.read(metrics.STREAM_BATCHES, lambda: counts.batches)
        exporter.read(metrics.STREAM_RETRIES, lambda: counts.retries)
        exporter.read(metrics.STREAM_STEP_SECONDS, lambda: counts.step_seconds)
        exporter.read(metrics.STREAM_FLUSH_SECONDS, lambda: counts.flush_seconds)
        exporter.read(metrics.STREAM_COMMIT_AGE, commit_age)
        exporter.read(metrics.STREAM_RECOVERY, lambda: self.recovery_seconds)
        exporter.read(metrics.STREAM_RECOVERED, lambda: self.recovered)
        exporter.read(metrics.STREAM_STATE_BYTES, state_bytes)
        exporter.read(metrics.STREAM_STATE_MEMORY, state_memory)
        exporter.read(metrics.STREAM_WAITING, waiting)
        exporter.read(metrics.STREAM_LAG, lambda: {(topic, str(p)): behind for (topic, p), behind in lag().items()})
        if isinstance(processor, Measured):
            processor.measure(exporter)


async def serve(health: Health, host: str, port: int) -> web.AppRunner:
    """Serves /healthz (event loop runs), /readyz (partitions assigned and recovered) and /metrics until `cleanup()`.

    Raises:
        OSError: the port is in use.
    """

    async def answer(request: web.Request) -> web.Response:
        answer = health.answer(request.path)
        return web.Response(status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type})

    site = web.Application()
    site.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(site, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    log.info("health and metrics on http://%s:%d", *runner.addresses[0][:2])
    return runner


class Watchdog:
    """Ends the process when a partition or the event loop is stalled for too long. Runs in its own thread, because the
    event loop may be stalled.

    Args:
        counts: `progressed_at` is the time up to which all partitions progressed, `standing` a stalled partition.
        limit: seconds.
        end: called with the exit code, to end the process.
    """

    def __init__(
        self, app_id: str, counts: DeliveryCounts, limit: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self._app = app_id
        self._counts = counts
        self._limit = limit
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._counts.progressed_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            still = time.monotonic() - self._counts.progressed_at
            if still > self._limit:
                standing = self._counts.standing
                log.critical(
                    "%s has made no progress for %.0f s although there is something to do%s: ending with exit code %d. "
                    "The stacks of all threads follow",
                    self._app,
                    still,
                    "" if standing is None else f" on {standing[0]}[{standing[1]}]",
                    ExitCode.ERROR,
                )
                faulthandler.dump_traceback(sys.stderr)
                self._end(ExitCode.ERROR)
                return
