"""Episodes in parallel while their workers are killed at random, and the cost of a step beside verifiers.

A scripted model calls a Python tool three times and answers. First the cost: episodes one after the other, in one
worker and with verifiers' ToolEnv, whose tool starts the same program without a wall; `overhead_ms_per_step` is the
time of an episode by its turns, with the start of the tool's process. Then BENCH_EPISODES (200) tasks for BENCH_WORKERS
(3) workers. After every few outcomes a random one is killed and started again; each tool call leaves a process in a
session of its own. `per_second`: tasks by the time until all have an outcome, waits for the group's members included.

The last line on stdout is one JSON object. `leaked`: processes and folders of episodes that are left at the end. It
ends with 1 if a task has no outcome or more than one, or if something leaked.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from schemas import topics
from schemas.records import Outcome, OutcomeKind, Record, Result, Source, Status, Task, Terms, Verifier
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.bench.episode_backend import ANSWER, TURNS
from tests.bench.lab import environment, environment_with, log, own_kafka, process, report

VERIFIERS = ("verifiers==0.1.5", "openai")
ALONE = 10
AT_ONCE = 16
BETWEEN = (4, 16)
"""Outcomes from one kill to the next: all workers are killed again and again, and each makes progress."""
PAUSE_S = (0.5, 3.0)
LIMIT_S = 3600.0


def asked(task_id: str, question: str) -> Task:
    """A task of one episode."""
    return Task(
        task_id=task_id,
        event_time=0,
        policy="bench",
        environment="toolcall",
        messages=({"role": "user", "content": question},),
        n_samples=1,
        verifier=Verifier(name="episode", data=json.dumps({"answer": ANSWER})),
        terms=Terms(rl=Source.RESULT),
    )


def read(settings: Settings, topic: str, kind: type[Record]) -> list[Record]:
    """The records of one kind in a topic."""
    codec = make_codec(settings)
    found = (stored.decode(codec) for stored in read_to_end(settings, topic) if stored.value is not None)
    return [record for record in found if isinstance(record, kind)]


@dataclass
class Workers:
    """The workers as processes, whose temporary files are in `folder`."""

    settings: Settings
    url: str
    folder: Path
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, *options: str) -> None:
        """Starts a worker."""
        command = [sys.executable, "-m", "tentalis.cli", "worker", "--environment", "toolcall"]
        command += ["--server", self.url, "--worker-id", name, "--model", "base", *options]
        variables = environment(self.settings) | {"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        with (self.folder.parent / f"{name}.log").open("ab") as sink:
            self.running[name] = subprocess.Popen(command, env=variables, stdout=sink, stderr=sink)

    def kill(self, name: str) -> None:
        """Kills a worker, and starts it again."""
        self.running[name].kill()
        self.running[name].wait()
        self.start(name, *PARALLEL)

    def stop(self) -> None:
        """Ends all workers."""
        for child in self.running.values():
            child.terminate()
        for child in self.running.values():
            child.wait(60)
        self.running.clear()

    def left(self) -> list[str]:
        """What episodes left: their folders, and processes that work in one."""
        found = [str(each) for each in self.folder.iterdir()]
        for each in psutil.process_iter():
            try:
                if each.cwd().startswith(str(self.folder)):
                    found.append(f"process {each.pid}: {' '.join(each.cmdline())}")
            except psutil.Error:
                continue
        return found


PARALLEL = ("--concurrency", str(AT_ONCE), "--episodes", str(AT_ONCE))


@contextmanager
def backend() -> Iterator[str]:
    """Runs the model server; yields its URL."""
    port = free_port()
    child = subprocess.Popen([sys.executable, "-m", "tests.bench.episode_backend", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def overhead(workers: Workers) -> float:
    """Milliseconds of a step of episodes one after the other."""
    log(f"{ALONE} episodes, one after the other")
    send(workers.settings, [asked(f"alone-{number}", "What is 6 * 7?") for number in range(ALONE)])
    workers.start("alone", "--concurrency", "1", "--episodes", "1")
    results: list[Result] = []
    while len(results) < ALONE:
        time.sleep(0.5)
        if workers.running["alone"].poll() is not None:
            raise RuntimeError((workers.folder.parent / "alone.log").read_text()[-3000:])
        results = [each for each in read(workers.settings, topics.RESULTS, Result) if isinstance(each, Result)]
    workers.stop()
    bad = [each.error for each in results if each.status is not Status.OK or len(each.turns) != TURNS]
    if bad:
        raise RuntimeError(f"episodes were not played: {bad}")
    return 1000 * sum(each.elapsed_s for each in results) / (TURNS * len(results))


def of_verifiers(url: str, episodes: int, at_once: int) -> dict[str, float]:
    """The seconds and rewards of episodes with verifiers."""
    log(f"{episodes} episodes with {VERIFIERS[0]}, {at_once} at the same time")
    command = [environment_with("verifiers", VERIFIERS), str(Path(__file__).with_name("episodes_verifiers.py"))]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, url, str(episodes), str(at_once)], env=variables, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if (found["reward"], found["n"]) != (1.0, episodes):
        raise RuntimeError(f"verifiers played other episodes: {found}")
    return found


def send(settings: Settings, tasks: list[Task]) -> None:
    """Writes tasks."""
    publisher = Publisher(settings, "bench", make_codec(settings))
    for task in tasks:
        publisher.send(topics.TASKS, task)
    publisher.flush()


def killed(workers: Workers, episodes: int, n_workers: int, rng: random.Random) -> tuple[float, int]:
    """Plays tasks while workers are killed. Returns the seconds and the number of kills."""
    log(f"{episodes} episodes in {n_workers} workers, which are killed at random")
    names = [f"w{number}" for number in range(n_workers)]
    for name in names:
        workers.start(name, *PARALLEL)
    send(workers.settings, [asked(f"task-{number}", "What is 6 * 7, detached?") for number in range(episodes)])
    began, kills, done, kill_at = time.monotonic(), 0, 0, 0
    while done < episodes:
        time.sleep(rng.uniform(*PAUSE_S))
        done = len({each.outcome_key for each in outcomes(workers.settings)})
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(f"{done} of {episodes} tasks have an outcome after {LIMIT_S:g} s")
        if kill_at <= done < episodes:
            log(f"{done} outcomes, {kills} kills")
            workers.kill(rng.choice(names))
            kills += 1
            kill_at = done + rng.randint(*BETWEEN)
    seconds = time.monotonic() - began
    workers.stop()
    return seconds, kills


def outcomes(settings: Settings) -> list[Outcome]:
    """The outcomes of the tasks, without those of superseded results."""
    found = [each for each in read(settings, topics.OUTCOMES, Outcome) if isinstance(each, Outcome)]
    return [each for each in found if each.outcome_key.startswith("task-") and each.kind not in _BESIDE]


_BESIDE = frozenset((OutcomeKind.SUPERSEDED, OutcomeKind.LATE))


def main() -> int:
    episodes, n_workers = int(os.environ.get("BENCH_EPISODES", "200")), int(os.environ.get("BENCH_WORKERS", "3"))
    seed = int(os.environ.get("BENCH_SEED", "0"))
    with backend() as url, tempfile.TemporaryDirectory() as place, own_kafka() as settings:
        folder = Path(place) / "tmp"
        folder.mkdir()
        workers = Workers(settings, url, folder)
        try:
            cost = overhead(workers)
            theirs = of_verifiers(url, ALONE, 1)
            with process(settings, "serve", "scoring"), process(settings, "serve", "join"):
                seconds, kills = killed(workers, episodes, n_workers, random.Random(seed))
        finally:
            workers.stop()
        counts = Counter(each.outcome_key for each in outcomes(settings))
        kinds = Counter(each.kind.value for each in outcomes(settings))
        left = workers.left()
        parallel = of_verifiers(url, episodes, AT_ONCE)
        twice = sum(count != 1 for count in counts.values())
        for each in left:
            log(f"left: {each}")
        report(
            episodes=len(counts),
            infra=kinds[OutcomeKind.INFRA.value],
            leaked=len(left),
            per_second=episodes / seconds,
            overhead_ms_per_step=cost,
            kills=kills,
            twice=twice,
            verifiers_per_second=episodes / parallel["seconds"],
            verifiers_overhead_ms_per_step=1000 * theirs["seconds"] / (TURNS * ALONE),
        )
        return int(bool(left) or twice > 0 or len(counts) != episodes)


if __name__ == "__main__":
    sys.exit(main())
