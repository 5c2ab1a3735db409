"""A real vLLM, started by `tentalis serve vllm`."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 900.0


@contextmanager
def running_vllm(model: Path, *options: str) -> Iterator[str]:
    """Serves the model in a folder under the folder's name; yields the URL once the server is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tentalis.cli", "serve", "vllm", "--policy-model", str(model), "--port", str(port)]
    process = subprocess.Popen([*command, *options], env=os.environ | {"TENTALIS_LOG": "INFO"})
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _healthy(url):
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it is not healthy in time"
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
