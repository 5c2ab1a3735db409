"""A broker with the topics and no stack: components are started by hand, as an operator does."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.records import Record, Source, Task, Terms, Verifier
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.ops.verify import verify
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.drill.fault import Sight
from tests.drill.shell import PATIENCE_S, Shell
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.loop_records import result, task

GARBAGE = b"this is no record"


class Workload:
    """Tasks on a broker, and the verifier over them. `runs` are verified when the site is left."""

    def __init__(self, settings: Settings, policy: str = "drill") -> None:
        self.settings, self.policy = settings, policy
        self.codec = make_codec(settings)
        self.publisher = Publisher(settings, "drill", self.codec)
        self.runs: set[str] = set()
        self._numbers = itertools.count()

    def put(self, topic: str, *records: Record) -> None:
        for record in records:
            self.publisher.send(topic, record)
        self.publisher.flush()

    def made(self, run: str, count: int, **fields: Any) -> list[Task]:
        """Makes tasks that wait an hour for their result, and notes their run; writes nothing."""
        terms = Terms(rl=Source.RESULT, deadline_ms=3_600_000)
        more: dict[str, Any] = {"policy": self.policy, "terms": terms, "verifier": Verifier(name="taste")} | fields
        tasks = [
            task(f"{run}-{next(self._numbers)}", n=1, run_id=run, event_time=now_ms(), **more) for _ in range(count)
        ]
        self.runs.add(run)
        return tasks

    def ask(self, run: str, count: int = 8, **fields: Any) -> list[Task]:
        """Writes tasks that wait an hour for their result. `fields`: of each task."""
        asked = self.made(run, count, **fields)
        self.put(topics.TASKS, *asked)
        return asked

    def answer(self, tasks: list[Task]) -> None:
        """Writes their results."""
        now: dict[str, Any] = {"event_time": now_ms()}
        self.put(topics.RESULTS, *(result(each, version=0, opened_at=each.event_time, **now) for each in tasks))

    def garbage(self, topic: str, count: int, partition: int = 0) -> None:
        """Writes records that nobody can decode."""
        for number in range(count):
            self.publisher.send_bytes(topic, b"garbage-%d" % number, GARBAGE, partition=partition)
        self.publisher.flush()

    def problems(self, *runs: str) -> list[str]:
        """The problems that the verifier finds in these runs, or in all."""
        return [
            f"{run}: {problem}" for run in runs or sorted(self.runs) for problem in verify(self.settings, run).problems
        ]

    def verify_until_now(self) -> None:
        """Verifies the runs before a fault deletes what proves them. They must be without a problem after it, too: an
        accepted loss is given up. Raises AssertionError."""
        assert not (found := self.problems()), found

    def given_up(self, *runs: str) -> int:
        """The samples of runs that the verifier counts as given up."""
        return sum(verify(self.settings, run).numbers["given_up"] for run in runs)

    def settled(self, *runs: str) -> None:
        """Waits until every sample has its outcome and the verifier finds no problem."""
        eventually(lambda: not self.problems(*runs), 60, 1.0, lambda: "\n".join(self.problems(*runs)[:5]))


class Bench:
    """The broker, a home, a shell, and the processes that were started by hand."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.folder, self.home = folder, folder / "home"
        self.broker = EmbeddedBroker(folder / "kafka", port, free_port(avoid=(port,)))
        self.settings = Settings(bootstrap=self.broker.bootstrap, home=self.home)
        env = {"TENTALIS_BOOTSTRAP": self.broker.bootstrap, "TENTALIS_HOME": str(self.home)}
        self.shell = Shell(folder, env)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def open(self) -> None:
        self.home.mkdir()
        self.broker.start()
        self.broker.wait_ready()
        ensure_topics(self.settings)
        self.work = Workload(self.settings)
        self.start("scoring")

    def close(self) -> None:
        self.shell.close()
        self.broker.stop()

    def lost(self) -> list[str]:
        """Returns the verifier's findings on all tasks of this bench."""
        return self.work.problems()

    # Processes.

    def log(self, app: str) -> str:
        file = self.folder / f"{app}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, app: str, *options: str) -> None:
        """Starts a stream application."""
        (self.folder / f"{app}.log").write_bytes(b"")
        words = ("tentalis", "serve", app, *options)
        self.processes[app] = self.shell.begin(" ".join(words), self.folder / f"{app}.log")

    def works(self, app: str) -> None:
        """Waits until an application owns partitions."""
        eventually(lambda: "owns partitions [0" in self.log(app), 90, 0.2, lambda: self.log(app)[-3000:])

    def stop(self, app: str) -> None:
        code = self.shell.end(self.processes.pop(app))
        assert code == 0, f"{app} was asked to stop and ended with {code}: {self.log(app)[-2000:]}"

    def sight(self, app: str, timeout: float = 120.0) -> Sight:
        """Waits until an application ends by itself; what it says."""
        process = self.processes.pop(app)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            self.shell.end(process)
        return Sight(code=code, says=self.log(app))

    def refused(self, app: str, *options: str) -> Sight:
        """Starts an application that should end by itself."""
        self.start(app, *options)
        return self.sight(app)

    def caught_up(self, app: str) -> None:
        """Waits until an application has committed all that is on its inputs."""
        eventually(lambda: has_read(self.settings, app), 60, 0.5, lambda: f"{app} has lag: {self.log(app)[-2000:]}")

    @contextmanager
    def running(self, app: str, *options: str) -> Iterator[None]:
        """Runs an application for the block."""
        self.start(app, *options)
        self.works(app)
        yield
        self.stop(app)


def has_read(settings: Settings, app: str) -> bool:
    """True if an application has committed all that is on its inputs."""
    application = topology.named(app)
    committed = committed_offsets(settings, application.consumer_group(), application.consumes)
    return all(
        committed.get((name, partition), 0) >= end
        for name in application.consumes
        for partition, end in end_offsets(settings, name).items()
    )


def until(check: object, seconds: float = PATIENCE_S, every: float = 0.5) -> bool:
    """Calls `check` until it returns a true value; False if it never did."""
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
