"""Stream applications under a fixed rota of starts, stops, freezes and kills, in the shape of Kafka's StreamsEosTest.

Three join workers, two scoring workers and one hinting worker run beside a driver. Every turn of the rota does one
thing to one of them (below), the broker is killed once and restarted once. Then everything may finish, and two
verifiers that share no code with the applications read the topics:

- the halves log folded by brute force says which rollouts and outcomes there must be, by key, content and digest;
- `tentalis.verify` says from the inputs whether every result and feedback has its half and every sample its outcome.

    make chaos [DURATION=600] [TASKS=20000]

The last line on stdout is one JSON object: tasks, lost, wrong, duplicates, restarts, and what was done.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from tentalis.config import Settings
from tentalis.kafka import NoSuchTopic
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.verify.model import Kind, Report
from tentalis.verify.reader import verify
from tests.chaos import brute_force
from tests.chaos.driver import Driver
from tests.kafka_fixture import ensure_topics, eventually

FLEET = {"join-0": "join", "join-1": "join", "join-2": "join", "scoring-0": "scoring", "scoring-1": "scoring"}
FLEET |= {"hinting-0": "hinting"}
NOBODY = "http://127.0.0.1:9"
"""The teacher's address: the driver makes the hints that would need one."""
TAKEOVER_S = 60.0
KINDS = frozenset({"kill", "stop", "freeze", "doze", "kill broker", "restart broker"})


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Worker:
    """One process of an application. `instance` is its name in the consumer group."""

    def __init__(self, bootstrap: str, folder: Path, instance: str, application: str) -> None:
        self.instance = instance
        self.log = folder / f"{instance}.log"
        self._began = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "tentalis.cli", "serve", application, "--instance", instance]
        command += ["--server", NOBODY] if application == "hinting" else []
        # Partitions move between workers with and without state on disk, and back to databases that were left behind.
        command += ["--state", "memory" if instance.endswith("-0") else "rocksdb"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ
                | {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(folder), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    @property
    def owns_partitions(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._began)
            return b"owns partitions" in log.read()

    def end(self, how: signal.Signals) -> int:
        """Sends a signal that ends it, and waits; its exit code."""
        self.process.send_signal(how)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@dataclass
class Rota:
    """The fleet, and what is done to it."""

    broker: EmbeddedBroker
    folder: Path
    workers: dict[str, Worker] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    restarts: int = 0

    def start(self, instance: str) -> None:
        self.workers[instance] = Worker(self.broker.bootstrap, self.folder, instance, FLEET[instance])

    def tend(self) -> None:
        """Starts again whoever ended by himself."""
        for instance, worker in self.workers.items():
            code = worker.process.poll()
            if code is not None:
                say(f"{instance} ended by itself with {code}")
                self.done["ended by itself"] += 1
                self._again(instance)

    def _again(self, instance: str) -> None:
        self.restarts += 1
        self.start(instance)

    def _at_work(self, instance: str) -> Worker:
        """The worker, once it is in its group: before, there is nobody to stop in order or to take over from."""
        worker = self.workers[instance]
        eventually(
            lambda: worker.owns_partitions or worker.process.poll() is not None, TAKEOVER_S, 0.2, f"{instance} works"
        )
        return worker

    def kill(self, instance: str) -> None:
        self.workers[instance].end(signal.SIGKILL)
        self._again(instance)

    def stop(self, instance: str) -> None:
        """In good order: it must end with 0, or 143 as a process that was told to."""
        worker = self._at_work(instance)
        code = worker.end(signal.SIGTERM)
        if code not in (0, 143):
            raise AssertionError(f"{instance} was asked to stop and ended with {code}: see {worker.log}")
        self._again(instance)

    def freeze(self, instance: str) -> None:
        """A successor of the same name takes over from a frozen worker and is killed; then the frozen one wakes up."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        successor = Worker(self.broker.bootstrap, self.folder, instance, FLEET[instance])
        try:
            eventually(
                lambda: successor.owns_partitions, TAKEOVER_S, 0.2, f"the successor of {instance} owns partitions"
            )
            time.sleep(1.0)
        finally:
            successor.end(signal.SIGKILL)
            frozen.process.send_signal(signal.SIGCONT)
        self.restarts += 1
        # Fenced out, it must end by itself; `tend` starts it again.
        eventually(lambda: frozen.process.poll() is not None, TAKEOVER_S, 0.2, f"{instance} woke up and is fenced")

    def doze(self, instance: str) -> None:
        """Frozen for longer than the group waits: its peers take over, and it wakes up among them."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        time.sleep(14.0)
        frozen.process.send_signal(signal.SIGCONT)

    def kill_broker(self, _: str) -> None:
        self.broker.kill()
        self.broker.start()
        self.broker.wait_ready()

    def restart_broker(self, _: str) -> None:
        self.broker.stop()
        self.broker.start()
        self.broker.wait_ready()

    def turns(self) -> list[tuple[str, Callable[[str], None], str]]:
        """One round of the rota."""
        return [
            ("kill", self.kill, "join-0"),
            ("stop", self.stop, "scoring-0"),
            ("freeze", self.freeze, "join-1"),
            ("kill", self.kill, "scoring-1"),
            ("kill", self.kill, "hinting-0"),
            ("stop", self.stop, "join-2"),
            ("doze", self.doze, "join-0"),
            ("kill", self.kill, "join-2"),
            ("freeze", self.freeze, "scoring-0"),
            ("stop", self.stop, "join-1"),
            ("kill", self.kill, "join-1"),
        ]

    def play(self, driver: Driver, seconds: float) -> None:
        """Turn after turn until everything is sent and everything was done once; the broker goes down at a third and at
        two thirds."""
        began = time.monotonic()
        brokers = [("kill broker", self.kill_broker, 1 / 3), ("restart broker", self.restart_broker, 2 / 3)]
        turns = self.turns()
        while not driver.done or not self.done.keys() >= KINDS:
            if brokers and time.monotonic() - began > brokers[0][2] * seconds:
                name, act, _ = brokers.pop(0)
                turn = (name, act, "")
                self.restarts += 1
            else:
                turn = turns[sum(self.done[name] for name in ("kill", "stop", "freeze", "doze")) % len(turns)]
            say(f"{turn[0]} {turn[2]} ({driver.sent} sent)")
            turn[1](turn[2])
            self.done[turn[0]] += 1
            for _ in range(3):
                time.sleep(1.0)
                self.tend()

    def end(self) -> None:
        for worker in self.workers.values():
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGCONT)
                worker.process.terminate()
        for worker in self.workers.values():
            try:
                worker.process.wait(15)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def run(folder: Path, *, seconds: float, tasks: int, seed: int) -> dict[str, Any]:
    """The whole experiment; what it ends with."""
    port = free_port()
    broker = EmbeddedBroker(folder / "kafka", port, free_port(avoid=(port,)))
    broker.start()
    rota = Rota(broker, folder)
    try:
        broker.wait_ready()
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        for instance in FLEET:
            rota.start(instance)
        name = f"chaos-{seed}"
        driver = Driver(settings, name, tasks, seconds, seed)
        driver.start()
        rota.play(driver, seconds)
        say(f"all is sent: {driver.sent} records; waiting for the rest")
        report = _settled(rota, settings, name)
        say("folding the halves log by brute force")
        lost, wrong, doubled, writes = brute_force.differences(settings)
    finally:
        rota.end()
        broker.stop()
    problems = [str(problem) for problem in report.problems]
    for line in (*problems[:20], *lost[:20], *wrong[:20], *doubled[:20]):
        say(line)
    kinds = Counter(problem.kind for problem in report.problems)
    return {
        "tasks": report.numbers["tasks"],
        "lost": len(lost) + kinds[Kind.LOST] + kinds[Kind.OPEN],
        "wrong": len(wrong) + kinds[Kind.WRONG],
        "duplicates": len(doubled) + kinds[Kind.DUPLICATE],
        "restarts": rota.restarts,
        "done": dict(rota.done),
        "seed": seed,
        "outcomes": report.outcomes,
        "numbers": report.numbers,
        "writes": writes,
    }


def _settled(rota: Rota, settings: Settings, name: str) -> Report:
    """Reads until nothing is open, for two minutes past the last deadline at most."""
    deadline = time.monotonic() + 180
    while True:
        rota.tend()
        time.sleep(5.0)
        try:
            report = verify(settings, name)
        except (NoSuchTopic, TimeoutError, KafkaException) as error:
            say(f"cannot be read yet: {error}")
            continue
        waiting = Counter(problem.kind for problem in report.problems)
        if time.monotonic() > deadline or not (waiting[Kind.OPEN] or waiting[Kind.LOST]):
            return report
        say(f"open {waiting[Kind.OPEN]}, not there yet {waiting[Kind.LOST]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the driver sends")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--keep", type=Path, help="folder for logs and data, kept; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="tentalis-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(folder, seconds=options.seconds, tasks=options.tasks, seed=options.seed)
    sound = (report["lost"], report["wrong"], report["duplicates"]) == (0, 0, 0)
    if sound and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not sound:
        say(f"logs and data are in {folder}")
    print(json.dumps(report))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
