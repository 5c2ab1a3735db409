"""Runs the streams under a steady load for half an hour and checks for growth, lag, warnings and loss.

Every stream application runs on an embedded broker, the join twice. A driver sends tasks with halves that come in any
order, late, twice or never, and sessions beside them, with one turn for every ten tasks. The default rate is half of
the capacity of two cores. Finished tasks, sessions and windows are kept for `MEMORY_S` instead of an hour or a day: so
state stops growing within minutes, and later growth is a leak. Only scoring and hinting have an option for this time;
the others run through `tests.chaos.short_memory`, which gives the reasons.

    make soak [DURATION=1800] [RATE=75] [STATE=memory|rocksdb]

The last line on stdout is one JSON object; its `reasons` list the failures, by the limits of `tests.chaos.verdict`, and
the exit code is 1 if there are any. Growth is judged in runs of at least a quarter of an hour (`judged_from_s`; null:
not judged): that of resident memory without RocksDB's cache and buffers, which take an hour to fill up to their limit.
The broker's memory is only reported: its heap is limited.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.bench.lab import cpu_seconds, metrics_of, rss_mib
from tests.chaos import losses, verdict
from tests.chaos.conversations import MEAN_TURNS, conversation
from tests.chaos.driver import Driver
from tests.chaos.fault_schedule import say
from tests.chaos.verdict import End, Seen
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.model_server import hinters_file, model_server

MEMORY_S = 120
IDLE_S = 30
TURN_SHARE = 0.1
"""Main turns of conversations per task."""
DRAIN_S = 300.0
"""Time limit to drain: a check for losses takes 16 us of CPU per record, and half an hour leaves two million."""
COMPLAINT = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) |^Traceback")
BUFFERS = "tentalis_stream_state_buffers_bytes"
LAG = "tentalis_stream_lag_records"
CONFIRMED = "tentalis_stream_records_total"
DEAD_LETTERS = "tentalis_stream_dead_letters_total"
OPEN = {
    "open_tasks": "tentalis_join_open_tasks",
    "open_sessions": "tentalis_sessions_open_sessions",
    "unlearnt_sessions": "tentalis_experience_open_sessions",
}
HELD = OPEN | {
    "open_bytes": "tentalis_join_open_bytes",
    "remembered_tasks": "tentalis_join_remembered_tasks",
    "remembered_results": "tentalis_pairing_remembered_results",
    "remembered_sessions": "tentalis_sessions_remembered_sessions",
}


class Worker:
    """One process of an application, with its log and its metrics."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, bootstrap: str) -> None:
        self.name, self.log, self.port = name, folder / f"{name}.log", free_port()
        shared = ["--instance", name, "--metrics-port", str(self.port)]
        names = {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *shared], env=os.environ | names, stdout=log, stderr=log
            )

    def ready(self) -> bool:
        """True if the worker owns partitions and has recovered them. Raises RuntimeError if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} did not start: see {self.log}")
        return b"owns partitions" in self.log.read_bytes()

    def complaints(self) -> list[str]:
        """The worker's log lines at WARNING or above."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [f"{self.name}: {line}" for line in lines if COMPLAINT.match(line)]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def fleet(bootstrap: str, folder: Path, state: str, server: str) -> list[Worker]:
    """Starts the workers."""
    serve, short = ["tentalis.cli", "serve"], ["tests.chaos.short_memory"]
    horizon = ["--feedback-horizon", str(MEMORY_S)]
    lessons = ["--hinters", str(hinters_file(folder, server)), "--server", server]
    commands = {
        "join-0": [*short, "join", str(MEMORY_S)],
        "join-1": [*short, "join", str(MEMORY_S)],
        "scoring-0": [*serve, "scoring", *horizon],
        "hinting-0": [*serve, "hinting", "--server", server, *horizon],
        "aggregation-0": [*short, "aggregation", str(MEMORY_S)],
        "sessions-0": [*short, "sessions", str(MEMORY_S), "--idle", str(IDLE_S)],
        "experience-0": [*short, "experience", str(MEMORY_S), *lessons, "--idle", str(IDLE_S)],
    }
    return [Worker(name, [*command, "--state", state], folder, bootstrap) for name, command in commands.items()]


@dataclass
class Watch:
    """Measures the workers periodically and keeps the measurements."""

    workers: Sequence[Worker]
    broker_pid: int
    began: float = field(default_factory=time.monotonic)
    seen: Seen = field(default_factory=Seen)
    broker_mib: list[float] = field(default_factory=list)
    buffers_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    dead_letters: float = 0.0

    def ended(self) -> list[str]:
        """The workers that ended by themselves."""
        codes = {worker: worker.process.poll() for worker in self.workers}
        return [f"{worker.name} ended with {code}" for worker, code in codes.items() if code is not None]

    def look(self) -> None:
        """Measures every process once; keeps nothing if one of them does not answer."""
        found: dict[str, Mapping[str, float]] = {}
        for worker in self.workers:
            try:
                found[worker.name] = metrics_of(worker.port)
            except OSError as error:
                say(f"{worker.name} does not answer: {error}")
                self.seen.unanswered += 1
                return
        seen = self.seen
        seen.at.append(time.monotonic() - self.began)
        self.broker_mib.append(rss_mib(self.broker_pid))
        for worker in self.workers:
            name, metrics = worker.name, found[worker.name]
            buffers = metrics[BUFFERS] / 2**20
            self.buffers_mib[name].append(buffers)
            seen.memory.setdefault(name, []).append(rss_mib(worker.process.pid) - buffers)
            seen.lag.setdefault(name, []).append(metrics[LAG])
            seen.confirmed.setdefault(name, []).append(metrics[CONFIRMED])
        for label, metric in HELD.items():
            seen.held.setdefault(label, []).append(sum(metrics.get(metric, 0.0) for metrics in found.values()))
        self.dead_letters = sum(metrics[DEAD_LETTERS] for metrics in found.values())
        say(self._line())

    def left_open(self) -> dict[str, float]:
        """The open tasks and sessions at the last measurement."""
        return {label: self.seen.held[label][-1] for label in OPEN} if self.seen.at else {}

    def _line(self) -> str:
        seen = self.seen
        figures = [f"{name} {values[-1]:,.0f}" for name, values in seen.held.items()]
        figures += [f"{n} {mib[-1]:.0f} MiB {seen.lag[n][-1]:,.0f} behind" for n, mib in seen.memory.items()]
        return f"{seen.at[-1]:5.0f} s  " + ", ".join(figures)


def run(folder: Path, *, seconds: float, rate: float, state: str, every: float, seed: int) -> dict[str, Any]:
    """Runs the soak and returns the report."""
    port = free_port()
    # Each group forms once, with all its members: a rebalance during a start would log a warning.
    forming = {"group.initial.rebalance.delay.ms": "5000"}
    broker = EmbeddedBroker(folder / "kafka", port, free_port(avoid=(port,)), settings=forming)
    broker.start()
    workers: list[Worker] = []
    try:
        broker.wait_ready()
        assert broker.process is not None
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        with model_server() as server:
            workers = fleet(broker.bootstrap, folder, state, server)
            eventually(lambda: all(worker.ready() for worker in workers), 120, 0.5, "not every worker owns partitions")
            sessions = max(1, round(rate * seconds * TURN_SHARE / MEAN_TURNS))
            drivers = [
                Driver(settings, "soak", round(rate * seconds), seconds, seed, garbage=sys.maxsize, again=False),
                Driver(settings, "talk", sessions, seconds, seed, events=conversation, again=False),
            ]
            for driver in drivers:
                driver.start()
            watch = Watch(workers, broker.process.pid)
            before = _cpu(workers, broker)
            # Ends with the last task: the records after it are not part of the steady load.
            for look in range(1, sys.maxsize):
                watch.look()
                time.sleep(max(0.0, watch.began + every * look - time.monotonic()))
                if watch.ended() or time.monotonic() > watch.began + seconds:
                    break
            lasted = time.monotonic() - watch.began
            after = {} if watch.ended() else _cpu(workers, broker)
            end = _end(watch, drivers, settings)
    finally:
        for worker in workers:
            worker.end()
        broker.stop()
    return {
        "tasks": drivers[0].tasks,
        "sessions": drivers[1].tasks,
        "seconds": round(lasted),
        "rate": rate,
        "state": state,
        "records": sum(driver.sent for driver in drivers),
        "cores_busy": {name: round((spent - before[name]) / lasted, 3) for name, spent in after.items()},
        **_figures(watch),
        "dead_letters": end.dead_letters,
        "left_open": end.left_open,
        "warnings": len(end.complaints),
        "first_warnings": end.complaints[:5],
        "lost": len(end.lost),
        "first_lost": end.lost[:5],
        "reasons": verdict.reasons(watch.seen, end),
    }


def _end(watch: Watch, drivers: Sequence[Driver], settings: Settings) -> End:
    """Waits until nothing is open and nothing is missing, for at most DRAIN_S seconds."""
    after, lost = Watch(watch.workers, watch.broker_pid), list[str]()
    if not watch.ended():
        eventually(lambda: all(driver.done for driver in drivers), 120, 1.0, "not all records are sent")
        say("all records are sent; waiting for the applications")
        deadline = time.monotonic() + DRAIN_S
        while not after.ended():
            time.sleep(2.0)
            after.look()
            drained = bool(after.seen.at) and not any(after.left_open().values())
            if drained or time.monotonic() > deadline:
                lost = losses.lost(partial(read_to_end, settings), make_codec(settings))
                if not lost or time.monotonic() > deadline:
                    break
    complaints = [line for worker in watch.workers for line in worker.complaints()]
    return End(after.ended(), complaints, lost, after.left_open() or watch.left_open(), after.dead_letters)


def _figures(watch: Watch) -> dict[str, Any]:
    """A summary of the measurements; for growth, only of those in the part of the run that is judged."""
    seen, since = watch.seen, verdict.flat_from(watch.seen)
    if len(seen.at) < 2:
        return {"looks": len(seen.at), "unanswered_looks": seen.unanswered}
    first = next(index for index, at in enumerate(seen.at) if at >= seen.at[-1] / verdict.FLAT_FROM)
    begins = seen.at[first]
    return {
        "looks": len(seen.at),
        "unanswered_looks": seen.unanswered,
        "judged_from_s": None if since is None else round(since),
        "memory_mib": {name: [round(mib[first]), round(mib[-1])] for name, mib in seen.memory.items()},
        "growth_mib_h": {
            name: round(3600 * verdict.growth(seen.at, mib, begins), 1) for name, mib in seen.memory.items()
        },
        "broker_mib": [round(watch.broker_mib[first]), round(watch.broker_mib[-1])],
        "buffers_mib": {name: round(max(held)) for name, held in watch.buffers_mib.items()},
        "records_s": {name: round(verdict.per_second(seen, name)) for name in seen.lag},
        "most_lag": {name: round(max(lag)) for name, lag in seen.lag.items()},
        "held": {name: [min(values[first:]), max(values[first:])] for name, values in seen.held.items()},
    }


def _cpu(workers: Sequence[Worker], broker: EmbeddedBroker) -> dict[str, float]:
    assert broker.process is not None
    used = {worker.name: cpu_seconds(worker.process.pid) for worker in workers}
    return used | {"broker": cpu_seconds(broker.process.pid), "driver": time.process_time()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="seconds for which the drivers send")
    parser.add_argument("--rate", type=float, default=75.0, help="tasks per second, of 1.9 samples each")
    parser.add_argument("--state", choices=["memory", "rocksdb"], default="memory")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two measurements")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder in which logs and data are kept; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="tentalis-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(
        folder,
        seconds=options.seconds,
        rate=options.rate,
        state=options.state,
        every=options.every,
        seed=options.seed,
    )
    sound = not report["reasons"]
    if sound and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not sound:
        say(f"logs and data are in {folder}")
    print(json.dumps(report))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
