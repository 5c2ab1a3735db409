"""Stream applications as processes on a broker of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.records import Record
from streams.processor import LogRecord
from tentalis.config import Settings
from tentalis.kafka import Publisher, make_codec, read_to_end
from tests.kafka_fixture import eventually


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
