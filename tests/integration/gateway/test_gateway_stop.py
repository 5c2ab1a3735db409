"""The end of a gateway's process: it finishes the calls under way, unless it gets a second signal."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.support.gateway_lab import Script, backend_app, chunks, listening, wait_for
from tests.support.kafka_fixture import Kafka, ensure_topics

pytestmark = pytest.mark.broker


@contextmanager
def gateway(backend: str, kafka: Kafka, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A gateway as a process of its own."""
    ensure_topics(Settings(bootstrap=kafka.bootstrap))
    port = free_port()
    command = [sys.executable, "-m", "tentalis.cli", "serve", "gateway", "--server", backend, "--port", str(port)]
    command += ["--spool-dir", str(folder / "spool"), "--bootstrap-server", kafka.bootstrap]
    process = subprocess.Popen(command, env=os.environ | {"TENTALIS_HOME": str(folder)})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(lambda: process.poll() is not None or ready(client))
            assert process.poll() is None
            yield process, client
    finally:
        process.kill()
        process.wait(30)


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


BODY = {"model": "base", "messages": [{"role": "user", "content": "x"}], "stream": True}


def test_a_gateway_that_is_told_to_stop_finishes_what_it_began(kafka: Kafka, tmp_path: Path) -> None:
    script = Script(gate=threading.Event())
    assert script.gate is not None
    with listening(backend_app(script)) as backend, gateway(backend, kafka, tmp_path) as (process, client):
        with (
            client.stream("POST", "/v1/chat/completions", json=BODY) as answer,
            client.stream("GET", "/v1/events?types=step") as watching,
        ):
            events, said = watching.iter_lines(), chunks(answer)
            assert next(events) == ": watching" and next(said)
            process.send_signal(signal.SIGTERM)
            assert "event: end" in list(events), "who watches is not waited for"
            time.sleep(3.0)
            assert process.poll() is None
            script.gate.set()
            assert list(said)[-1] is None
        assert process.wait(30) == 0


def test_a_gateway_that_is_told_twice_stops_at_once(kafka: Kafka, tmp_path: Path) -> None:
    script = Script(gate=threading.Event())
    with listening(backend_app(script)) as backend, gateway(backend, kafka, tmp_path) as (process, client):
        with client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            said = chunks(answer)  # without a name it would be closed at once, and its connection with it
            assert next(said)
            process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert script.gate is not None
        script.gate.set()
