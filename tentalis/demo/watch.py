"""Watches a run on the log and the processes of its stack, from the creation of the topics to the last outcome."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from schemas import topics
from tentalis.demo.stats import RunStats
from tentalis.demo.view import Snapshot, live_view, plain_line
from tentalis.kafka.lag import Groups, LagProbe, drain, groups_of
from tentalis.service.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from tentalis.kafka.reader import Reader

log = logging.getLogger(__name__)

PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.5
TRAINER_ENDS_S = 30.0
DRAIN_S = 60.0
TOPICS = (
    topics.RUNS,
    topics.TASKS,
    topics.RESULTS,
    topics.OUTCOMES,
    topics.FEEDBACK,
    topics.BATCHES,
    topics.POLICIES,
    topics.POLICY_ACKS,
)
# Rollbacks after which a run that comes no further is ended.
MOST_SETBACKS = 5
# A run can finish without these processes; if they failed, the summary says why.
DISPENSABLE = ("aggregation",)


class RunFailed(Exception):
    """The run cannot continue. The message has the cause and the end of the failed process's log."""


class Interrupted(Exception):
    """The user interrupted the run."""


class Processes(Protocol):
    """The part of the supervisor that a watch uses."""

    def status(self) -> dict[str, dict[str, Any]]: ...

    def failure(self) -> str | None: ...

    def broken(self) -> Mapping[str, str]: ...


@dataclass
class RunWatch:
    """Watches one run. `command`: the command that continues it; `notice`: returns a new remark on the records so
    far, which is printed, or None; `view`: shows the progress, instead of the console."""

    run_id: str
    steps: int
    environment: str
    policy: str
    settings: Settings
    processes: Processes
    console: "Console"
    stop: threading.Event
    groups: Groups
    command: str
    notice: Callable[[RunStats], str | None] | None = None
    view: Callable[[Snapshot], None] | None = None
    stats: RunStats = field(init=False)
    skipped: int = field(init=False, default=0)
    _told: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.stats = RunStats(self.run_id)
        self._started, self._begun_ms = time.monotonic(), round(time.time() * 1000)
        self._lag = LagProbe(self.settings, self.groups)

    @property
    def elapsed(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._started

    @property
    def start_seconds(self) -> float | None:
        """Seconds from the beginning of the watch until the first task or answer, None before it."""
        return self.stats.start_seconds(self._begun_ms)

    def follow(self) -> None:
        """Watches the run until the trainer has ended and no record is in flight. Raises Interrupted or RunFailed."""
        self._until_done("topics")
        self._lag.start()
        try:
            self._watch()
        finally:
            self._lag.stop()
        self._until_done("trainer", TRAINER_ENDS_S)
        self.drain()

    def stay(self) -> None:
        """Watches the processes until they are stopped. Raises Interrupted or RunFailed."""
        while not self.stop.wait(0.5):
            self.check()

    def drain(self) -> None:
        """Waits until records in flight (a repeated answer after a kill, a late hint) have reached their outcome."""
        started = self.processes.status().keys() - {"trainer"}  # has ended: the rest of its topic is another run's
        groups = groups_of(self.environment, self.policy, started)
        if not drain(self.settings, groups, self.stop, DRAIN_S):
            self.check()
            log.warning("records are still in flight after %g s; `tentalis up` processes them", DRAIN_S)

    def check_stop(self) -> None:
        """Raises Interrupted after Ctrl-C."""
        if self.stop.is_set():
            raise Interrupted

    def check(self) -> None:
        """Raises Interrupted after Ctrl-C, RunFailed if a process that the run needs has failed."""
        self.check_stop()
        if failure := self.processes.failure():
            raise RunFailed(failure)
        for name, reason in self.processes.broken().items():
            if name not in DISPENSABLE:
                raise RunFailed(f"{name}: {reason}")

    def _until_done(self, name: str, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.processes.status()[name]["state"] != "done":
            self.check()
            if deadline is not None and time.monotonic() > deadline:
                log.warning("%s has not ended within %g s", name, timeout)
                return
            self.stop.wait(0.1)

    def _watch(self) -> None:
        if self.view is not None:
            self._read_until_done(self.view, LIVE_EVERY_S)
            return
        if not self.console.is_terminal:
            self._read_until_done(lambda now: self.console.print(plain_line(now), soft_wrap=True), PLAIN_EVERY_S)
            return
        from rich.live import Live

        size = self.console.size
        with Live(live_view(self._snapshot(), *size), console=self.console, refresh_per_second=4) as live:

            def show(now: Snapshot) -> None:
                nonlocal size
                if self.console.size != size:  # the terminal rewrapped the old view
                    size = self.console.size
                    self.console.clear()
                live.update(live_view(now, *size))

            self._read_until_done(show, LIVE_EVERY_S)

    def _read_until_done(self, show: Any, every: float) -> None:
        reader = self._reader()
        due = time.monotonic()
        try:
            while True:
                self.check()
                done = self.processes.status()["manager"]["state"] == "done"
                reader, idle = self._read(reader)
                self._remark()
                # The manager is done because of records on the log, so the reader gets them too.
                finished = done and idle and reader.caught_up
                if finished or time.monotonic() >= due:
                    show(self._snapshot())
                    due = time.monotonic() + every
                if finished:
                    return
        finally:
            self.skipped = reader.skipped
            reader.close()

    def _remark(self) -> None:
        remark = None if self.notice is None else self.notice(self.stats)
        if remark is not None:
            self.console.print(remark, soft_wrap=True)
        self.tell_setbacks()

    def tell_setbacks(self) -> None:
        """Tells the reason of each rollback. Raises RunFailed if the run does not come further."""
        setbacks = self.stats.setbacks(self._begun_ms)
        for reason in setbacks:
            if reason not in self._told:
                self._told.add(reason)
                self.console.print(f"going on from an earlier version: {reason}", soft_wrap=True)
        if len(setbacks) >= MOST_SETBACKS:
            raise RunFailed(
                f"{len(setbacks)} versions in a row were not kept, the last one because {setbacks[-1]}. Begin a new "
                "run with smaller steps (`--set optimizer.lr=...`), with wider limits (`--set guard....`), or without "
                f"the guard (`--set promotion=always`). `{self.command}` goes on with this run."
            )

    def _read(self, reader: "Reader") -> tuple["Reader", bool]:
        """Applies new records; returns the reader and whether there were none.

        After a lost connection, reads the log again from the start with new statistics.
        """
        from confluent_kafka import KafkaException

        try:
            found = reader.poll(0.5)
        except KafkaException as error:
            log.warning("reading the log again: %s", error)
            reader.close()
            self.stats = RunStats(self.run_id)
            return self._reader(), False
        for stored, record in found:
            self.stats.apply(record, stored.timestamp)
        return reader, not found

    def _reader(self) -> "Reader":
        from confluent_kafka import KafkaException

        from tentalis.kafka.codec import make_codec
        from tentalis.kafka.reader import Reader

        while True:
            self.check()
            try:
                return Reader(self.settings, TOPICS, make_codec(self.settings))
            except KafkaException as error:
                log.info("the broker does not answer yet: %s", error)
                self.stop.wait(0.5)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self.stats, self.steps, self.processes.status(), self._lag.lags, self.elapsed, command=self.command
        )
