"""The streams under a steady load for half an hour: does anything grow, fall behind, or complain?

Two join workers, a scoring and a hinting worker on an embedded broker; the driver of the chaos run sends tasks with
halves that come in any order, late, twice or never. Closed tasks and results are remembered for `MEMORY_S` here instead
of a day and an hour: so what is remembered stops growing after five minutes, and what grows after that is a leak.

    make soak [DURATION=1800] [RATE=150] [STATE=memory|rocksdb]

The last line on stdout is one JSON object. `growth_mib_h` is the slope of a least-squares line through the resident
memory of the last two thirds, without what RocksDB's cache and buffers hold: these fill up to their bound for an hour.
Exit code 1: an outcome is missing, a task stays open, or a worker said something at WARNING or above.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.records import Opens, Task
from tentalis.config import Settings
from tentalis.kafka import make_codec, read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tests.bench.lab import cpu_seconds, metrics_of, rss_mib
from tests.chaos.driver import Driver
from tests.chaos.rota import NOBODY, say
from tests.kafka_fixture import ensure_topics, eventually

MEMORY_S = 300
EARLY_S = 300.0
COMPLAINT = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) |^Traceback")


class Worker:
    """One process of an application, with its log and its metrics."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: Path, bootstrap: str) -> None:
        self.name, self.log, self.port = name, folder / f"{name}.log", free_port()
        command = [sys.executable, "-m", module, *arguments, "--instance", name, "--metrics-port", str(self.port)]
        names = {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=os.environ | names, stdout=log, stderr=log)

    def ready(self) -> bool:
        """Whether it owns partitions and has recovered them."""
        return b"owns partitions" in self.log.read_bytes()

    def metrics(self) -> dict[str, float]:
        """Each metric, summed over its labels. Raises OSError while the worker does not answer."""
        return metrics_of(self.port)

    def complaints(self) -> list[str]:
        """What it said at WARNING or above."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [f"{self.name}: {line}" for line in lines if COMPLAINT.match(line)]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def fleet(broker: EmbeddedBroker, folder: Path, state: str) -> list[Worker]:
    """The workers. The joins come by the benchmarks' entry: the command has no setting for how long it remembers."""
    cli, join = "tentalis.cli", "tests.bench.join_ours"
    horizon = ("--feedback-horizon", str(MEMORY_S), "--state", state, "--state-dir")
    short = ("--state", state, "--marker-ttl-ms", str(1000 * MEMORY_S))
    arguments = {
        "join-0": (join, [broker.bootstrap, "tentalis-join", str(folder / "state-join-0"), *short]),
        "join-1": (join, [broker.bootstrap, "tentalis-join", str(folder / "state-join-1"), *short]),
        "scoring-0": (cli, ["serve", "scoring", *horizon, str(folder / "state-scoring-0")]),
        "hinting-0": (cli, ["serve", "hinting", "--server", NOBODY, *horizon, str(folder / "state-hinting-0")]),
    }
    return [Worker(name, module, args, folder, broker.bootstrap) for name, (module, args) in arguments.items()]


@dataclass
class Samples:
    """What was seen, every few seconds."""

    began: float = field(default_factory=time.monotonic)
    at: list[float] = field(default_factory=list)
    unanswered: int = 0
    rss: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, workers: Sequence[Worker], broker_pid: int) -> None:
        """One look at every process; none if one of them does not answer. Raises RuntimeError if a worker is gone."""
        sums: dict[str, float] = defaultdict(float)
        buffers: dict[str, float] = {}
        for worker in workers:
            if worker.process.poll() is not None:
                raise RuntimeError(f"{worker.name} ended with {worker.process.returncode}: see {worker.log}")
            try:
                found = worker.metrics()
            except OSError as error:
                say(f"{worker.name} does not answer: {error}")
                self.unanswered += 1
                return
            for name, value in found.items():
                sums[name] += value
            buffers[worker.name] = found[BUFFERS] / 2**20
        self.at.append(time.monotonic() - self.began)
        self.rss["broker"].append(rss_mib(broker_pid))
        for worker in workers:
            self.rss[worker.name].append(rss_mib(worker.process.pid))
            self.buffers[worker.name].append(buffers[worker.name])
        for label, metric in SERIES.items():
            self.totals[label].append(sums[metric])

    def growth(self, name: str) -> float:
        """MiB per hour over the last two thirds: least squares."""
        own = [rss - held for rss, held in zip_longest(self.rss[name], self.buffers.get(name, ()), fillvalue=0.0)]
        pairs = [(at, mib) for at, mib in zip(self.at, own, strict=True) if at >= self.at[-1] / 3]
        mean_at, mean = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        spread = sum((at - mean_at) ** 2 for at, _ in pairs)
        return 3600 * sum((at - mean_at) * (mib - mean) for at, mib in pairs) / spread if spread else 0.0

    def early(self, name: str) -> float:
        """Resident memory after five minutes, or after a third of a shorter run."""
        moment = min(EARLY_S, self.at[-1] / 3)
        return next(rss for at, rss in zip(self.at, self.rss[name], strict=True) if at >= moment)


BUFFERS = "tentalis_stream_state_buffers_bytes"
SERIES = {
    "open_tasks": "tentalis_join_open_tasks",
    "open_bytes": "tentalis_join_open_bytes",
    "remembered_tasks": "tentalis_join_remembered_tasks",
    "remembered_results": "tentalis_pairing_remembered_results",
    "state_disk_bytes": "tentalis_stream_state_disk_bytes",
    "lag": "tentalis_stream_lag_records",
    "dead_letters": "tentalis_stream_dead_letters_total",
}


def missing(settings: Settings) -> list[str]:
    """Samples without an outcome. A task that opens with its first feedback and got none is none of them."""
    codec = make_codec(settings)
    answered = {str(stored.key) for stored in read_to_end(settings, topics.OUTCOMES)}
    opened = {str(stored.key) for stored in read_to_end(settings, topics.HALVES)}
    wanted = set()
    for stored in read_to_end(settings, topics.TASKS):
        task = stored.decode(codec)
        assert isinstance(task, Task)
        if task.terms.opens is Opens.AT_ONCE or task.task_id in opened:
            wanted |= {f"{task.task_id}/{index}" for index in range(task.n_samples)}
    return sorted(wanted - answered)


def run(folder: Path, *, seconds: float, rate: float, state: str, every: float, seed: int) -> dict[str, Any]:
    """The whole soak; what it ends with."""
    port = free_port()
    # The groups form once, of all their members: a rebalance in the middle of a start would be a warning.
    forming = {"group.initial.rebalance.delay.ms": "5000"}
    broker = EmbeddedBroker(folder / "kafka", port, free_port(avoid=(port,)), settings=forming)
    broker.start()
    workers: list[Worker] = []
    try:
        broker.wait_ready()
        assert broker.process is not None
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        workers = fleet(broker, folder, state)
        eventually(lambda: all(worker.ready() for worker in workers), 60, 0.5, "every worker owns partitions")
        driver = Driver(settings, "soak", round(rate * seconds), seconds, seed, garbage=sys.maxsize)
        driver.start()
        samples, looks = Samples(), 0
        before = _cpu(workers, broker)
        # What comes after the last task is the tail of the load, not the load.
        while samples.began + seconds > time.monotonic():
            samples.take(workers, broker.process.pid)
            if samples.at:
                say(_line(samples))
            looks += 1
            time.sleep(max(0.0, samples.began + every * looks - time.monotonic()))
        lasted = time.monotonic() - samples.began
        busy = {name: (spent - before[name]) / lasted for name, spent in _cpu(workers, broker).items()}
        eventually(lambda: driver.done, 120, 1.0, "everything is sent")
        say(f"all is sent: {driver.sent} records; waiting for the rest")
        left, deadline = Samples(), time.monotonic() + 180
        lost = [""]
        while lost and time.monotonic() < deadline:
            time.sleep(2.0)
            left.take(workers, broker.process.pid)
            if left.totals["open_tasks"][-1:] == [0] or time.monotonic() > deadline:
                lost = missing(settings)
        complaints = [line for worker in workers for line in worker.complaints()]
        report = {
            "tasks": driver.tasks,
            "seconds": round(lasted),
            "rate": rate,
            "state": state,
            "records": driver.sent,
            "cores_busy": {name: round(cores, 3) for name, cores in busy.items()},
            "rss_mib": {n: [round(samples.early(n)), round(rss[-1])] for n, rss in samples.rss.items()},
            "buffers_mib": {name: [round(min(held)), round(max(held))] for name, held in samples.buffers.items()},
            "growth_mib_h": {name: round(samples.growth(name), 1) for name in samples.rss},
            **{name: _range(samples, values) for name, values in samples.totals.items()},
            "left_open": left.totals["open_tasks"][-1:],
            "unanswered_looks": samples.unanswered,
            "warnings": len(complaints),
            "first_warnings": complaints[:5],
            "lost": len(lost),
            "first_lost": lost[:5],
        }
    finally:
        for worker in workers:
            worker.end()
        broker.stop()
    return report


def _cpu(workers: Sequence[Worker], broker: EmbeddedBroker) -> dict[str, float]:
    assert broker.process is not None
    used = {worker.name: cpu_seconds(worker.process.pid) for worker in workers}
    return used | {"broker": cpu_seconds(broker.process.pid), "driver": time.process_time()}


def _range(samples: Samples, values: Sequence[float]) -> dict[str, float]:
    """Least and most of the last two thirds, where what is remembered does not grow any more."""
    settled = [value for at, value in zip(samples.at, values, strict=True) if at >= samples.at[-1] / 3]
    return {"min": min(settled), "max": max(settled)}


def _line(samples: Samples) -> str:
    figures = [f"{name} {values[-1]:,.0f}" for name, values in samples.totals.items()]
    return f"{samples.at[-1]:5.0f} s  " + ", ".join(
        figures + [f"{n} {rss[-1]:.0f} MiB" for n, rss in samples.rss.items()]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long the driver sends")
    parser.add_argument("--rate", type=float, default=150.0, help="tasks per second, of 1.9 samples each")
    parser.add_argument("--state", choices=["memory", "rocksdb"], default="memory")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for logs and data, kept; default: a temporary one")
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
    sound = report["lost"] == report["warnings"] == 0 and report["left_open"] == [0]
    if sound and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not sound:
        say(f"logs and data are in {folder}")
    print(json.dumps(report))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
