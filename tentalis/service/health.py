"""The HTTP endpoints of a process: /healthz (it is alive), /readyz (it can do its work), /metrics."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tentalis.service import variables
from tentalis.service.metrics import READY, Exporter
from tentalis.service.ports import port_taken

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"
RECOVERING = "recovering"
"""The first word of the reason of a process that restores its state from the log: supervisors show it as recovering."""
WAITING = "waiting for"
"""The first words of the reason of a process that lacks only what another one does: no supervisor restarts it."""


@dataclass(frozen=True, slots=True)
class HealthResponse:
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


class LoopWatch:
    """The time since the last turn of a process's main loop.

    Args:
        limit: seconds without a turn after which the loop counts as stuck.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.turned()

    def turned(self) -> None:
        """Records a turn of the loop."""
        self._at = time.monotonic()

    def stuck(self) -> str | None:
        """The reason to end the process if its loop is stuck, else None."""
        still = time.monotonic() - self._at
        return None if still < self._limit else f"its main loop has been stuck for {still:.0f} s"


class Health:
    """The health answers of one process. Both callables return the problem in a few words, or None; they are called on
    the serving thread.

    Args:
        not_ready: the reason why the process cannot do its work now.
        stuck: the reason why it should be restarted.
    """

    def __init__(
        self,
        exporter: Exporter,
        not_ready: Callable[[], str | None],
        stuck: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.exporter = exporter
        self.not_ready = not_ready
        self.stuck = stuck
        exporter.read(READY, lambda: float(not_ready() is None))

    def answer(self, path: str) -> HealthResponse:
        """The response to a GET of `path`."""
        match path:
            case "/healthz":
                return _verdict("ok", self.stuck())
            case "/readyz":
                return _verdict("ready", self.not_ready())
            case "/metrics":
                from prometheus_client import CONTENT_TYPE_LATEST

                return HealthResponse(200, CONTENT_TYPE_LATEST, self.exporter.exposition())
        return HealthResponse(404, TEXT, b"there are /healthz, /readyz and /metrics\n")


def _verdict(good: str, problem: str | None) -> HealthResponse:
    if problem is None:
        return HealthResponse(200, TEXT, f"{good}\n".encode())
    return HealthResponse(503, TEXT, f"not {good}: {problem}\n".encode())


def host() -> str:
    """The address to listen on: TENTALIS_METRICS_HOST, by default the loopback interface."""
    return variables.METRICS_HOST.read()


@contextmanager
def served(health: Health, port: int | None) -> Iterator[int | None]:
    """Serves the endpoints on a background thread while the context is open; yields the port. `port` None serves
    nothing; 0 takes a free port.

    Raises PortTaken.
    """
    if port is None:
        yield None
        return
    try:
        server = _HealthServer((host(), port), _handler(health))
    except OSError as error:
        what = f"server of health and metrics of the {health.exporter.process}"
        raise port_taken(host(), port, what, error, "--metrics-port (0: a free one)") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="health", daemon=True)
    thread.start()
    log.info("health and metrics on http://%s:%d", host(), server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _HealthServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a request for health or metrics failed", exc_info=True)


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            answer = health.answer(self.path.partition("?")[0])
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler
