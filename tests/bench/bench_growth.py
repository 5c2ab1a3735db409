"""How the join's cost grows with workers and with state.

Workers: 1, 2 and 4 of them fold the same pre-filled halves (1,000 tokens, see join_load.py) on 8 partitions. Tasks per
second is of log time, between the moments at which 10 % and 90 % of the outcomes were appended; CPU is user and system
time of all workers per task, from the first tenth on. Workers, broker and this driver share the machine's cores.

State: a worker begins with 10k, 100k, 1M tasks that are remembered (a tenth of them open, each with a half of 20
tokens; written to the changelog by join_state.py), in memory and in RocksDB, and folds a load of its own on top. Then
it is killed with -9 and started again on an empty disk, and with RocksDB once more on the disk as it was left: seconds
from starting the process to its first outcome (`_recovery_s`; imports and joining the group included, as the row of 0
tasks shows), and of them in reading the state (`_read_s`, and how many records of the changelog that were).

BENCH_TASKS is the largest state (1,000,000); the loads scale with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

from schemas import topics
from streams.app import ensure_changelog
from tentalis.config import Settings
from tentalis.kafka import Publisher, end_offsets, make_codec
from tentalis.local.ports import free_port
from tests.bench.bench_join import ROOT, outcomes_since, stop, until_written
from tests.bench.join_load import halves, send
from tests.bench.join_state import PARTITIONS, state_rows
from tests.bench.lab import cpu_seconds, log, metrics_of, own_kafka, report, rss_mib

OPEN_SHARE = 10
LITTLE = 20
FORMING = {"group.initial.rebalance.delay.ms": "6000"}
"""The group forms once, of all its members."""

Child = subprocess.Popen[bytes]


@dataclass
class Group:
    """An application of its own: group, changelog, folder of state."""

    settings: Settings
    state: str = "memory"

    def __post_init__(self) -> None:
        self.app_id = f"growth-{uuid.uuid4().hex[:8]}"
        self.folder = self.settings.home / self.app_id
        self.port = free_port()

    def start(self, number: int = 0) -> Child:
        """One of its workers."""
        where = str(self.folder / str(number))
        command = [sys.executable, "-m", "tests.bench.join_ours", self.settings.require_bootstrap(), self.app_id, where]
        command += ["--state", self.state, "--instance", f"worker-{number}"]
        command += ["--metrics-port", str(self.port)] if number == 0 else []
        quiet = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "TENTALIS_LOG": "WARNING"}
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | quiet)

    def fill(self, open_tasks: int, closed_tasks: int, n_tokens: int) -> None:
        """Writes state to its changelog."""
        codec = make_codec(self.settings)
        ensure_changelog(self.settings.require_bootstrap(), self.app_id, "state", PARTITIONS)
        publisher, changelog = Publisher(self.settings, "bench", codec), topics.changelog(self.app_id, "state")
        for partition, key, value in state_rows(codec, open_tasks, closed_tasks, n_tokens):
            publisher.send_bytes(changelog, key.encode(), value, partition=partition)
        publisher.flush(300)

    def folded(self, tasks: int, workers: list[Child]) -> dict[str, float]:
        """What it takes to fold the load that lies there, of so many tasks."""
        start = end_offsets(self.settings, topics.OUTCOMES)
        seen = until_written(self.settings, start, tasks // 10, *workers)
        spent = sum(cpu_seconds(worker.pid) for worker in workers)
        done = until_written(self.settings, start, tasks, *workers)
        spent = sum(cpu_seconds(worker.pid) for worker in workers) - spent
        # Until its last batch is committed.
        time.sleep(2.5)
        times = [at for at, _ in outcomes_since(self.settings, start)]
        lasted = (times[len(times) * 9 // 10] - times[len(times) // 10]) / 1000
        return {
            "tasks_s": round(0.8 * len(times) / lasted) if lasted else 0,
            "cpu_us": round(1e6 * spent / (done - seen)) if done > seen else 0,
            "rss_mib": round(sum(rss_mib(worker.pid) for worker in workers)),
        }

    def recovered(self, *, kept: bool) -> tuple[float, Child]:
        """Starts a successor, on the disk as it is or on an empty one: seconds to its first outcome, and itself."""
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        codec, start = make_codec(self.settings), end_offsets(self.settings, topics.OUTCOMES)
        send(self.settings, codec, halves(f"probe-{uuid.uuid4().hex[:8]}", 1, 0, 0, codec))
        began = time.time()
        child = self.start()
        until_written(self.settings, start, 1, child)
        return outcomes_since(self.settings, start)[0][0] / 1000 - began, child


def by_workers(tasks: int) -> dict[str, dict[str, float]]:
    """1, 2, 4 workers on the same halves."""
    found = {}
    with own_kafka(FORMING) as settings:
        codec = make_codec(settings)
        log(f"filling {tasks} tasks")
        send(settings, codec, halves("bench", tasks, 2500, 0, codec))
        for count in (1, 2, 4):
            group = Group(settings)
            workers = [group.start(number) for number in range(count)]
            try:
                found[str(count)] = group.folded(tasks, workers)
            finally:
                for worker in workers:
                    stop(worker)
            log(f"{count} workers: {found[str(count)]}")
    return found


def on_state(settings: Settings, state: str, keys: int, n_tokens: int, load: int) -> dict[str, float]:
    """One worker on so many remembered tasks; the halves topic holds `load` tasks to fold."""
    group = Group(settings, state)
    open_tasks = keys // OPEN_SHARE
    group.fill(open_tasks, keys - open_tasks, n_tokens)
    child = group.start()
    try:
        found = group.folded(load, [child])
        for kept in (False, True) if state == "rocksdb" else (False,):
            stop(child, signal.SIGKILL)
            prefix = "kept" if kept else "empty"
            seconds, child = group.recovered(kept=kept)
            metrics = metrics_of(group.port)
            found |= {
                f"{prefix}_recovery_s": round(seconds, 2),
                f"{prefix}_read_s": round(metrics["tentalis_stream_recovery_seconds"], 2),
                f"{prefix}_read_records": round(metrics["tentalis_stream_recovered_records"]),
            }
            # Until the probe is committed: the next successor must not hear it again.
            time.sleep(2.5)
        found["disk_mib"] = round(sum(f.stat().st_size for f in group.folder.rglob("*") if f.is_file()) / 2**20)
    finally:
        stop(child)
        shutil.rmtree(group.folder, ignore_errors=True)
    log(f"{keys} tasks, {state}: {found}")
    return found


def by_state(sizes: list[int], n_tokens: int, load: int) -> dict[str, dict[str, dict[str, float]]]:
    """State by state, size by size."""
    found: dict[str, dict[str, dict[str, float]]] = {"memory": {}, "rocksdb": {}}
    with own_kafka() as settings:
        codec = make_codec(settings)
        log(f"filling {load} tasks")
        send(settings, codec, halves("bench", load, 500, 0, codec))
        for keys in sizes:
            for state, row in found.items():
                row[str(keys)] = on_state(settings, state, keys, n_tokens, load)
    return found


def main() -> None:
    tasks = int(os.environ.get("BENCH_TASKS", "1000000"))
    workers = by_workers(tasks * 6 // 100)
    state = by_state([0, tasks // 100, tasks // 10, tasks], LITTLE, max(2000, tasks // 50))
    report(tasks=tasks, open_tasks=tasks // OPEN_SHARE, workers=workers, state=state)


if __name__ == "__main__":
    main()
