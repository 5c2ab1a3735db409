"""What a process answers on its port: /healthz (it lives), /readyz (it can do its work), /metrics."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tentalis.metrics import READY, Exporter

log = logging.getLogger(__name__)

HOST = "TENTALIS_METRICS_HOST"
CLIENT_TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"


class PortTaken(Exception):
    """The port for health and metrics cannot be listened on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


class Turns:
    """When the loop of a process last came round.

    Args:
        limit: seconds after which it counts as standing still.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.turned()

    def turned(self) -> None:
        """It came round."""
        self._at = time.monotonic()

    def stuck(self) -> str | None:
        """Why the process should be ended: its loop does not come round. None if it does."""
        still = time.monotonic() - self._at
        return None if still < self._limit else f"its loop has stood still for {still:.0f} s"


class Health:
    """The answers of one process. Both callables say what is wrong in a few words, None if nothing is; they are called
    on whichever thread serves.

    Args:
        not_ready: why it cannot do its work now.
        stuck: why it should be ended and started again.
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

    def answer(self, path: str) -> Answer:
        """The response to a GET of `path`."""
        match path:
            case "/healthz":
                return _verdict("ok", self.stuck())
            case "/readyz":
                return _verdict("ready", self.not_ready())
            case "/metrics":
                from prometheus_client import CONTENT_TYPE_LATEST

                return Answer(200, CONTENT_TYPE_LATEST, self.exporter.exposition())
        return Answer(404, TEXT, b"there are /healthz, /readyz and /metrics\n")


def _verdict(good: str, problem: str | None) -> Answer:
    if problem is None:
        return Answer(200, TEXT, f"{good}\n".encode())
    return Answer(503, TEXT, f"not {good}: {problem}\n".encode())


def host() -> str:
    """Where to listen: TENTALIS_METRICS_HOST, by default on this machine only."""
    return os.environ.get(HOST) or "127.0.0.1"


@contextmanager
def served(health: Health, port: int | None) -> Iterator[int | None]:
    """Answers on a thread of its own while it is open; yields the port. `port` None: nowhere; 0: on a free one.

    Raises PortTaken.
    """
    if port is None:
        yield None
        return
    try:
        server = _Server((host(), port), _handler(health))
    except OSError as error:
        raise PortTaken(
            f"health and metrics of the {health.exporter.process} cannot be served on {host()}:{port}: {error}. "
            "Choose another with --metrics-port, or 0 for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="health", daemon=True)
    thread.start()
    log.info("health and metrics on http://%s:%d", host(), server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
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
