"""Stream applications as processes on a broker of their own, and a server that stands in for a teacher's."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import Record
from streams.processor import LogRecord
from tentalis.config import Settings
from tentalis.kafka import Publisher, make_codec, read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.opd import HINT_TAG
from tests.kafka_fixture import ensure_topics, eventually


class FakeModel(BaseHTTPRequestHandler):
    """Speaks the calls that hinting and experience make. The log-prob of a token is -token/100. `prompt`: tokens of
    every conversation without a hint, as the fixtures have them."""

    prompt = (1, 2, 3)

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "base@v1", "parent": "tiny"}, {"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "tiny"
        if self.path == "/tokenize":
            text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
            plain = "messages" in body and HINT_TAG not in text
            self._answer({"tokens": list(self.prompt) if plain else [ord(char) for char in text]})
        else:
            scores = [None] + [{str(token): {"logprob": -token / 100}} for token in body["prompt"][1:]]
            self._answer({"model": "tiny", "choices": [{"index": 0, "prompt_logprobs": scores}]})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Not on stderr."""


class Apps:
    """The applications as processes, on a broker of their own."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.codec = make_codec(settings)
        self.publisher = Publisher(settings, "test", self.codec)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str) -> None:
        environment = os.environ | {
            "TENTALIS_BOOTSTRAP": self.settings.require_bootstrap(),
            "TENTALIS_HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "tentalis.cli", "serve", name, "--instance", name, *options]
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def end(self, name: str, *, kill: bool = False) -> None:
        process = self.processes.pop(name)
        (process.kill if kill else process.terminate)()
        code = process.wait(10)
        assert kill or code == 0, f"{name} ended with {code}"

    def put(self, topic: str, *records: Record) -> None:
        for record in records:
            self.publisher.send(topic, record)
        self.publisher.flush()

    def put_bytes(self, record: LogRecord) -> None:
        key = None if record.key is None else record.key.encode()
        self.publisher.send_bytes(record.topic, key, None if record.tombstone else record.value)
        self.publisher.flush()

    def read(self, topic: str, kind: type[Record]) -> list[Any]:
        stored = read_to_end(self.settings, topic)
        return [record for each in stored if isinstance(record := each.decode(self.codec), kind)]

    def dead(self, topic: str) -> list[tuple[bytes | None, str]]:
        letters = read_to_end(self.settings, topics.dlq(topic))
        return [(each.value, dict(each.headers)["tentalis.dlq.consumer-group"].decode()) for each in letters]

    def wait(self, check: Callable[[], bool], timeout: float = 120) -> None:
        # A process that ended is no "not yet".
        def checked() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text()[-3000:]
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")
            return check()

        eventually(checked, timeout, interval=0.5)


@pytest.fixture
def apps(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Apps]:
    settings = Settings(bootstrap=own_broker.bootstrap)

    ensure_topics(settings)
    apps = Apps(settings, tmp_path)
    yield apps
    for process in apps.processes.values():
        process.kill()
        process.wait(10)


@pytest.fixture
def model() -> Iterator[tuple[int, Callable[[], None]]]:
    """A free port, and what starts the model server on it."""
    port, servers = free_port(), []

    def start() -> None:
        server = ThreadingHTTPServer(("127.0.0.1", port), FakeModel)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    yield port, start
    for server in servers:
        server.shutdown()
        server.server_close()
