"""Stream applications as processes on a broker of their own."""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from schemas import topics
from schemas.records import Record
from streams.runtime.processor import LogRecord
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.support.fork_server import ForkedProcess
from tests.support.kafka_fixture import ensure_topics, eventually


def partitions_owned(log: str) -> set[int]:
    """Returns the partitions in the last log line that names those of a process."""
    listed = re.findall(r"owns partitions \[([\d, ]*)\]", log)
    return {int(number) for number in listed[-1].split(",")} if listed and listed[-1] else set()


class Apps:
    """The applications as processes, on a broker of their own, with their state in memory or on disk."""

    def __init__(self, settings: Settings, folder: Path, state: str = "memory") -> None:
        ensure_topics(settings)
        self.settings, self.folder, self.state = settings, folder, state
        self.codec = make_codec(settings)
        self.publisher = Publisher(settings, "test", self.codec)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)

    def start(
        self, app: str, *options: str, instance: str = "", program: Sequence[str] = ("-m", "tentalis.cli")
    ) -> None:
        """`serve app` as a process, known by its instance, which is the application's name if none is given."""
        name = instance or app
        environment = os.environ | {
            "TENTALIS_BOOTSTRAP": self.settings.require_bootstrap(),
            "TENTALIS_HOME": str(self.folder),
            "TENTALIS_STATE": self.state,
            "OMP_NUM_THREADS": "1",
        }
        command = [*program, "serve", app, "--instance", name, *options]
        self.processes[name] = ForkedProcess(command, environment, self.folder / f"{name}.log")

    def log_of(self, name: str) -> str:
        """Returns the log of a process so far."""
        return (self.folder / f"{name}.log").read_text()

    def owned(self, name: str) -> set[int]:
        """The partitions that a process owns, or owned last."""
        return partitions_owned(self.log_of(name))

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
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log_of(name)[-3000:]}")
            return check()

        eventually(checked, timeout, interval=0.5)
