"""A server of S3 (moto's), the process of the pod `object-store`: `store.py` makes its image and the pod.

While the file /tmp/away exists it answers 503 to every request, as a store that is overloaded does. Each request and
the status of its answer are a line on stdout. What it holds is in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

PORT = 9000
AWAY = Path("/tmp/away")
BODY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'


class _Logged(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        print(self.client_address[0], self.command, self.path, code, flush=True)


def main() -> None:
    """Serves until the process ends."""
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not AWAY.exists():
            answered: Iterable[bytes] = moto(environ, start_response)
            return answered
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BODY)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [BODY]

    run_simple("0.0.0.0", PORT, application, threaded=True, request_handler=_Logged)


if __name__ == "__main__":
    main()
