"""The join compared with the same join in Quix Streams 3.28, and with the raw limit, on one broker in one run.

All fold the same pre-filled halves topic (see join_load.py) in turn, each in one process on one core, with the broker
and this driver on another core. `join_quix.py` describes the optimisations and omissions of the Quix version,
`join_raw.py` the raw limit.

Figures: tasks per second in log time, between the append times of 10 % and 90 % of the outcomes; CPU microseconds of
the process per task after its first tenth (the reliable figure on a busy machine); latency from the append of the half
that completes a task to that of its outcome, at a quarter of Quix's rate; bytes of keys and values on the changelog per
task; seconds from the start of the process on an empty disk, after a kill -9, to its first outcome; peak resident
memory. `same`: the rollouts of ours and Quix have the same digests, key by key. The exit code is 1 if they do not.

The hints are of kind none, except for those of the first hundred tasks, which test that the digests cover the teacher's
log-probs too.

BENCH_TASKS (20,000; a tenth of them stays open, with payload), BENCH_SPREAD (tasks between the halves of one, 2,500),
BENCH_RUNS (2 of each), BENCH_LATENCY_S (8), BENCH_ENGINES (ours,quix,raw). A default run takes some three minutes. For
the recovery of 100,000 open and 900,000 closed tasks see bench_recovery.py.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schemas import topics
from schemas.records import Rollout
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.service.settings import Settings
from tests.bench.join_load import Half, halves, send
from tests.bench.join_quix_state import changelog_of
from tests.bench.lab import cpu_seconds, environment_with, log, own_kafka, report
from tests.support import ROOT

QUIX = ("quixstreams==3.28.1", "fastavro")
BROKER_CORE, WORKER_CORE = 0, 1
OPEN_EVERY = 10
ACCEPTED = range(100)


@dataclass
class Engine:
    """One of the compared implementations, with its figures."""

    name: str
    settings: Settings
    folder: Path
    group: str = ""
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    rss_mb: float = 0.0

    def fresh(self) -> None:
        """Takes a new consumer group, so that the next process reads from the beginning."""
        self.group = f"bench-{self.name}-{uuid.uuid4().hex[:8]}"

    @property
    def changelog(self) -> str:
        return topics.changelog(self.group, "state") if self.name == "ours" else changelog_of(self.group)

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts the process, alone on its core and without local state."""
        python = environment_with("bench-quix", QUIX) if self.name == "quix" else sys.executable
        state = self.folder / f"{self.group}-{uuid.uuid4().hex[:8]}"
        command = [python, "-m", f"tests.bench.join_{self.name}", self.settings.require_bootstrap(), self.group]
        if self.name != "raw":
            command.append(str(state))
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            preexec_fn=lambda: os.sched_setaffinity(0, {WORKER_CORE}),
        )


def outcomes_since(settings: Settings, start: dict[int, int]) -> list[tuple[int, str]]:
    """(append time, key) of the outcomes from these offsets on, sorted."""
    stored = read_to_end(settings, topics.OUTCOMES, start=start)
    return sorted((record.timestamp, str(record.key)) for record in stored)


def until_written(settings: Settings, start: dict[int, int], count: int, *children: "subprocess.Popen[bytes]") -> int:
    """Waits for `count` outcomes and returns their number.

    Raises RuntimeError if a process ends, or no outcome comes for three minutes.
    """
    seen, heard = 0, time.monotonic()
    while seen < count:
        time.sleep(0.2)
        now = sum(end_offsets(settings, topics.OUTCOMES).values()) - sum(start.values())
        if now != seen:
            seen, heard = now, time.monotonic()
        codes = [child.poll() for child in children]
        if any(code is not None for code in codes) or time.monotonic() - heard > 180:
            raise RuntimeError(f"{children[0].args!r} has stalled with {seen} of {count} outcomes (exit codes {codes})")
    return seen


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in the status of the process: it has ended")


def stop(child: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
    child.send_signal(number)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def drain(engine: Engine, tasks: int) -> None:
    """Measures one run over the whole backlog, then kills the process with SIGKILL."""
    engine.fresh()
    start = end_offsets(engine.settings, topics.OUTCOMES)
    child = engine.start()
    try:
        warm = until_written(engine.settings, start, tasks // 10, child), cpu_seconds(child.pid)
        done = until_written(engine.settings, start, tasks, child), cpu_seconds(child.pid)
        engine.cpu_us.append(1e6 * (done[1] - warm[1]) / (done[0] - warm[0]))
        # Its last checkpoint is not part of the figures, but must be complete for the later measurements.
        time.sleep(2.5)
        engine.rss_mb = max(engine.rss_mb, peak_mb(child.pid))
    finally:
        stop(child, signal.SIGKILL)
    times = [at for at, _ in outcomes_since(engine.settings, start)]
    first, last = times[len(times) // 10], times[len(times) * 9 // 10]
    engine.rates.append(0.8 * len(times) / ((last - first) / 1000))
    log(f"{engine.name}: {engine.rates[-1]:,.0f} tasks/s, {engine.cpu_us[-1]:,.0f} us of CPU per task")


def recovery_s(engine: Engine, probe: Sequence[Half]) -> float:
    """Seconds from the start of a successor without local state to its first outcome."""
    codec = make_codec(engine.settings)
    start = end_offsets(engine.settings, topics.OUTCOMES)
    send(engine.settings, codec, probe)
    began = time.time()
    child = engine.start()
    try:
        until_written(engine.settings, start, 1, child)
    finally:
        stop(child)
    return outcomes_since(engine.settings, start)[0][0] / 1000 - began


def latency_ms(engine: Engine, name: str, rate: float, seconds: float) -> tuple[float, float]:
    """(p50, p99) of the ms from the append of a task's last half to that of its outcome, at `rate` tasks/s."""
    codec, settings = make_codec(engine.settings), engine.settings
    load = list(halves(name, int(rate * seconds), int(rate), 0, codec))
    start, ends = end_offsets(settings, topics.OUTCOMES), end_offsets(settings, topics.HALVES)
    child = engine.start()
    try:
        # It first catches up with the records sent for the other engines.
        send(settings, codec, halves(f"{name}-first", 1, 0, 0, codec))
        wait_for_key(settings, start, f"{name}-first-0/0")
        began, slice_s, sent = time.monotonic(), 0.01, 0
        per_slice = len(load) / (seconds / slice_s)
        from tentalis.kafka.producer import Publisher

        publisher = Publisher(settings, "bench", codec)
        for tick in range(int(seconds / slice_s)):
            for key, value, headers in load[sent : int((tick + 1) * per_slice)]:
                publisher.send_bytes(topics.HALVES, key.encode(), value, headers)
            sent = int((tick + 1) * per_slice)
            time.sleep(max(0.0, began + (tick + 1) * slice_s - time.monotonic()))
        for key, value, headers in load[sent:]:
            publisher.send_bytes(topics.HALVES, key.encode(), value, headers)
        publisher.flush(30)
        time.sleep(3)
    finally:
        stop(child)
    complete: dict[str, int] = {}
    for half in read_to_end(settings, topics.HALVES, start=ends):
        complete[str(half.key)] = max(half.timestamp, complete.get(str(half.key), 0))
    delays = sorted(
        at - complete[key[:-2]]
        for at, key in outcomes_since(settings, start)
        if key.startswith(name) and "first" not in key
    )
    if len(delays) < 0.99 * rate * seconds:
        log(f"{engine.name} closed only {len(delays)} of {rate * seconds:,.0f} tasks of the latency run")
    return statistics.median(delays), delays[len(delays) * 99 // 100]


def wait_for_key(settings: Settings, start: dict[int, int], key: str) -> None:
    deadline = time.monotonic() + 120
    while all(found != key for _, found in outcomes_since(settings, start)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no outcome {key} within two minutes")
        time.sleep(0.5)


def written(settings: Settings, start: dict[int, int]) -> dict[str, str]:
    """The rollouts from these offsets on: key -> digest."""
    codec, found = make_codec(settings), {}
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start):
        record = stored.decode(codec)
        assert isinstance(record, Rollout)
        found[record.rollout_id] = record.digest
    return found


def changelog_bytes(settings: Settings, topic: str) -> int:
    return sum(len(str(s.key)) + len(s.value or b"") for s in read_to_end(settings, topic))


def main() -> None:
    tasks = int(os.environ.get("BENCH_TASKS", "20000"))
    spread = int(os.environ.get("BENCH_SPREAD", "2500"))
    runs = int(os.environ.get("BENCH_RUNS", "2"))
    seconds = float(os.environ.get("BENCH_LATENCY_S", "8"))
    names = os.environ.get("BENCH_ENGINES", "ours,quix,raw").split(",")
    closed = tasks - len(range(0, tasks, OPEN_EVERY))
    if "quix" in names:
        environment_with("bench-quix", QUIX)
    figures: dict[str, object] = {}
    os.sched_setaffinity(0, {BROKER_CORE})
    with own_kafka() as settings:
        codec = make_codec(settings)
        log(f"filling {tasks} tasks, {closed} of them complete")
        send(settings, codec, halves("bench", tasks, spread, OPEN_EVERY, codec, ACCEPTED))
        engines = [Engine(name, settings, settings.home / "bench") for name in names]
        digests: dict[str, dict[str, str]] = {}
        for run in range(runs):
            for engine in engines:
                start = end_offsets(settings, topics.ROLLOUTS)
                drain(engine, tasks if engine.name == "raw" else closed)
                if engine.name != "raw" and run == 0:
                    digests[engine.name] = written(settings, start)
                    figures[f"{engine.name}_changelog_bytes"] = changelog_bytes(settings, engine.changelog) / tasks
        for engine in engines:
            figures |= {
                engine.name: statistics.median(engine.rates),
                f"{engine.name}_cpu_us": statistics.median(engine.cpu_us),
                f"{engine.name}_rss_mb": engine.rss_mb,
            }
        by_name = {engine.name: engine for engine in engines}
        for number, engine in enumerate(e for e in engines if e.name != "raw"):
            probe = list(halves(f"probe-{number}", 1, 0, 0, codec))
            figures[f"{engine.name}_recovery_s"] = recovery_s(engine, probe)
            if seconds:
                rate = 0.25 * statistics.median(by_name["quix" if "quix" in by_name else "ours"].rates)
                p50, p99 = latency_ms(engine, f"latency-{number}", rate, seconds)
                figures |= {f"{engine.name}_p50_ms": p50, f"{engine.name}_p99_ms": p99}
        if {"ours", "quix"} <= digests.keys():
            figures["same"] = digests["ours"] == digests["quix"]
            figures["ratio"] = figures["ours"] / figures["quix"]  # type: ignore[operator]
        if {"ours", "raw"} <= by_name.keys():
            figures["ratio_raw"] = figures["ours"] / figures["raw"]  # type: ignore[operator]
    report(tasks=tasks, open_tasks=tasks - closed, **figures)
    sys.exit(0 if figures.get("same", True) else 1)


if __name__ == "__main__":
    main()
