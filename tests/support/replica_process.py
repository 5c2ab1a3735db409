"""Replicas of a model server as processes, to be killed and started again."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import ROOT
from tests.support.kafka_fixture import eventually


class ReplicaProcess:
    """A replica at `url`, on a port that stays the same when it is started again."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it without adapters, and waits until it answers."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Starts it."""
        command = [sys.executable, "-m", "tests.support.replica_server", str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def wait(self) -> None:
        """Waits until it answers."""
        eventually(self._answers, 60, message="the replica does not start")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def load(self, name: str) -> None:
        """Loads an adapter."""
        body = json.dumps({"lora_name": name}).encode()
        request = urllib.request.Request(f"{self.url}/v1/load_lora_adapter", body)
        with urllib.request.urlopen(request, timeout=30):
            pass

    def end(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to its own process and waits for its end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


@contextmanager
def replicas(ports: list[int]) -> Iterator[list[ReplicaProcess]]:
    """Starts a replica on each port; ends them with the block."""
    made = [ReplicaProcess(port) for port in ports]
    try:
        for each in made:
            each.begin()
        for each in made:
            each.wait()
        yield made
    finally:
        for each in made:
            each.end()
