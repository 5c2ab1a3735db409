"""A server of Google Cloud Storage's API (gcp-storage-emulator) in this process, which can deny single uploads."""

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from importlib import import_module
from typing import Any
from urllib.request import Request, urlopen

from tentalis.storage import objects


@dataclass
class GcsServer:
    """The server. `uploads` counts the requests that bring content; the `deny`th one is answered with `status`."""

    port: int = 0
    deny: int = 0
    status: int = 403
    uploads: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bucket(self) -> str:
        """Makes a bucket and returns its URL."""
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        body = f'{{"name": "{name}"}}'.encode()
        urlopen(Request(f"{self.url}/storage/v1/b?project=test", body, {"Content-Type": "application/json"})).close()
        return f"gs://{name}"

    def denies(self, method: str, path: str) -> bool:
        """Counts an upload; True if it is the one to deny."""
        if method not in ("POST", "PUT") or "upload" not in path:
            return False
        self.uploads.append(f"{method} {path}")
        return len(self.uploads) == self.deny


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Runs the server until the context ends, for this process."""
    module = import_module("gcp_storage_emulator.server")
    storage = import_module("gcp_storage_emulator.storage").Storage(use_memory_fs=True)
    found, one_at_a_time = GcsServer(), threading.Lock()

    class Handler(module.RequestHandler):  # type: ignore[name-defined, misc, unused-ignore]
        """The handler of the package, behind the denied uploads. Its storage is not made for threads."""

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def _answer(self, method: str) -> None:
            with one_at_a_time:
                if found.denies(method, self.path):
                    self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    self.send_error(found.status)
                else:
                    getattr(super(), f"do_{method}")()

        def do_POST(self) -> None:
            self._answer("POST")

        def do_PUT(self) -> None:
            self._answer("PUT")

        def do_GET(self) -> None:
            self._answer("GET")

        def do_DELETE(self) -> None:
            if "upload_id" in self.path:  # as the real one answers, if an upload is given up
                self.send_error(499, "Client Closed Request")
            else:
                self._answer("DELETE")

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, storage))
    found.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, name="GCS", daemon=True)
    thread.start()
    variables = {"STORAGE_EMULATOR_HOST": found.url, "FSSPEC_GCS_TOKEN": "anon"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    objects._file_system.cache_clear()
    try:
        yield found
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        objects._file_system.cache_clear()
        server.shutdown()
        thread.join()
        server.server_close()
