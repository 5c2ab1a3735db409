"""The join's cost by number of workers and by size of state.

Workers: 1, 2 and 4 workers fold the same pre-filled halves (1,000 tokens, every second hint accepted, see join_load.py)
on 8 partitions. Tasks per second are measured in log time, between the append times of 10 % and 90 % of the outcomes;
CPU is user and system time of all workers per task, after the first tenth. Workers, broker and this driver share the
machine's cores.

State: a worker starts with 10k, 100k, 1M remembered tasks (a tenth of them open, each with a half of 20 tokens; written
to the changelog by join_state.py), in memory and in RocksDB, and folds an additional load. Then it is killed with -9
and restarted on an empty disk, and with RocksDB once more on the disk as it was left. `_recovery_s` are the seconds
from the start of the process until it has closed one open task in each partition, whose hints wait for it (including
imports and joining the group, as the row of 0 tasks shows, where it closes a new task). `_read_s` are the seconds of
these spent on reading the state, and `_read_records` the changelog records read.

BENCH_TASKS is the largest state (1,000,000); the loads scale with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from schemas import topics
from schemas.records import Outcome
from streams.runtime.worker import ensure_changelog
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.bench.bench_join import ROOT, outcomes_since, stop, until_written
from tests.bench.join_load import Half, halves, send
from tests.bench.join_state import PARTITIONS, Row, closing, state_rows
from tests.bench.lab import cpu_seconds, log, metrics_of, own_kafka, report, rss_mib

OPEN_SHARE = 10
LITTLE = 20
SECOND = range(1, 2**31, 2)
"""The tasks whose hint is accepted."""
FORMING = {"group.initial.rebalance.delay.ms": "6000"}
"""Broker setting with which the group forms once, with all its members."""

Child = subprocess.Popen[bytes]


@dataclass
class Group:
    """A separate application instance: consumer group, changelog, state folder."""

    settings: Settings
    state: str = "memory"

    def __post_init__(self) -> None:
        self.app_id = f"growth-{uuid.uuid4().hex[:8]}"
        self.folder = self.settings.home / self.app_id
        self.port = free_port()
        self.changelog = topics.changelog(self.app_id, "state")
        self.open_tasks = self.n_tokens = self.probed = 0
        self.closed: dict[str, str | None] = {}
        """The open tasks that were closed after a kill: key -> digest of the rollout."""

    @property
    def keeps(self) -> bool:
        """True if its state is on disk."""
        return self.state != "memory"

    def start(self, number: int = 0) -> Child:
        """Starts one of its workers."""
        where = str(self.folder / str(number))
        command = [sys.executable, "-m", "tests.bench.join_ours", self.settings.require_bootstrap(), self.app_id, where]
        command += ["--state", self.state, "--instance", f"worker-{number}"]
        command += ["--metrics-port", str(self.port)] if number == 0 else []
        quiet = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "TENTALIS_LOG": "WARNING"}
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | quiet)

    def fill(self, open_tasks: int, closed_tasks: int, n_tokens: int) -> None:
        """Writes state to its changelog."""
        ensure_changelog(self.settings.require_bootstrap(), self.app_id, "state", PARTITIONS)
        self.write(state_rows(make_codec(self.settings), open_tasks, closed_tasks, n_tokens))
        self.open_tasks, self.n_tokens = open_tasks, n_tokens

    def write(self, rows: Iterable[Row], headers: list[tuple[str, bytes]] | None = None) -> None:
        publisher = Publisher(self.settings, "bench", make_codec(self.settings))
        for partition, key, value in rows:
            publisher.send_bytes(self.changelog, key.encode(), value, headers, partition=partition)
        publisher.flush(300)

    def folded(self, tasks: int, workers: list[Child]) -> dict[str, float]:
        """Measures the folding of the load on the log, of `tasks` tasks."""
        start = end_offsets(self.settings, topics.OUTCOMES)
        seen = until_written(self.settings, start, tasks // 10, *workers)
        spent = sum(cpu_seconds(worker.pid) for worker in workers)
        done = until_written(self.settings, start, tasks, *workers)
        spent = sum(cpu_seconds(worker.pid) for worker in workers) - spent
        # Waits until its last batch is committed.
        time.sleep(2.5)
        times = [at for at, _ in outcomes_since(self.settings, start)]
        lasted = (times[len(times) * 9 // 10] - times[len(times) // 10]) / 1000
        return {
            "tasks_s": round(0.8 * len(times) / lasted) if lasted else 0,
            "cpu_us": round(1e6 * spent / (done - seen)) if done > seen else 0,
            "rss_mib": round(sum(rss_mib(worker.pid) for worker in workers)),
        }

    def recovered(self, *, kept: bool) -> tuple[dict[str, float], Child]:
        """Starts a successor, on the disk as it is or on an empty one; returns the figures of its recovery and its
        process.

        Raises RuntimeError if its outcomes are not those of the tasks to close.
        """
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        codec, asked = make_codec(self.settings), self._ask()
        start = end_offsets(self.settings, topics.OUTCOMES)
        publisher = Publisher(self.settings, "bench", codec)
        for partition, (key, value, headers) in asked:
            publisher.send_bytes(topics.HALVES, key.encode(), value, headers, partition=partition)
        publisher.flush()
        began = time.time()
        child = self.start()
        try:
            wanted = {f"{key}/0" for _, (key, _, _) in asked}
            until_written(self.settings, start, len(wanted), child)
            stored = list(read_to_end(self.settings, topics.OUTCOMES, start=start))
            outcomes = {str(each.key): each.decode(codec) for each in stored}
            if outcomes.keys() != wanted:
                raise RuntimeError(f"the outcomes are of {sorted(outcomes)}, expected {sorted(wanted)}")
            if self.open_tasks:
                self.closed |= {key: each.rollout_digest for key, each in outcomes.items() if isinstance(each, Outcome)}
            seconds = max(each.timestamp for each in stored) / 1000 - began
            return {"recovery_s": round(seconds, 2)} | self.read(), child
        except BaseException:
            stop(child)
            raise

    def read(self) -> dict[str, float]:
        """The recovery metrics of its worker."""
        metrics = metrics_of(self.port)
        return {
            "read_s": round(metrics["tentalis_stream_recovery_seconds"], 2),
            "read_records": round(metrics["tentalis_stream_recovered_records"]),
        }

    def _ask(self) -> list[tuple[int | None, Half]]:
        """The halves that close open tasks; without open tasks, the halves of a new task."""
        codec = make_codec(self.settings)
        if not self.open_tasks:
            return [(None, half) for half in halves(f"probe-{uuid.uuid4().hex[:8]}", 1, 0, 0, codec)]
        self.probed += 1
        return list(closing(codec, self.open_tasks, self.n_tokens, self.probed - 1))


def by_workers(tasks: int) -> dict[str, dict[str, float]]:
    """Measures 1, 2 and 4 workers on the same halves."""
    found = {}
    with own_kafka(FORMING) as settings:
        codec = make_codec(settings)
        log(f"filling {tasks} tasks")
        send(settings, codec, halves("bench", tasks, 2500, 0, codec, SECOND))
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


def on_state(group: Group, keys: int, n_tokens: int, load: int) -> dict[str, float]:
    """Measures one worker with `keys` remembered tasks; the halves topic holds `load` tasks to fold."""
    open_tasks = keys // OPEN_SHARE
    group.fill(open_tasks, keys - open_tasks, n_tokens)
    child = group.start()
    try:
        found = group.folded(load, [child])
        for kept in (False, True) if group.keeps else (False,):
            stop(child, signal.SIGKILL)
            took, child = group.recovered(kept=kept)
            found |= {f"{'kept' if kept else 'empty'}_{name}": figure for name, figure in took.items()}
            # Waits until its input is committed: the next successor must not read it again.
            time.sleep(2.5)
        found["disk_mib"] = round(sum(f.stat().st_size for f in group.folder.rglob("*") if f.is_file()) / 2**20)
    finally:
        stop(child)
        shutil.rmtree(group.folder, ignore_errors=True)
    log(f"{keys} tasks, {group.state}: {found}")
    return found


@contextmanager
def filled(load: int) -> Iterator[Settings]:
    """A broker with `load` tasks to fold, for one group: the halves that close its open tasks would close another's."""
    with own_kafka() as settings:
        codec = make_codec(settings)
        log(f"filling {load} tasks")
        send(settings, codec, halves("bench", load, 500, 0, codec, SECOND))
        yield settings


def by_state(sizes: list[int], load: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measures each size of state, in memory and in RocksDB."""
    found: dict[str, dict[str, dict[str, float]]] = {"memory": {}, "rocksdb": {}}
    for keys in sizes:
        for state, row in found.items():
            with filled(load) as settings:
                row[str(keys)] = on_state(Group(settings, state), keys, LITTLE, load)
    return found


def main() -> None:
    tasks = int(os.environ.get("BENCH_TASKS", "1000000"))
    workers = by_workers(tasks * 6 // 100)
    state = by_state([0, tasks // 100, tasks // 10, tasks], max(2000, tasks // 50))
    report(tasks=tasks, open_tasks=tasks // OPEN_SHARE, workers=workers, state=state)


if __name__ == "__main__":
    main()
