"""Stream applications under a fixed rota of starts, stops, freezes and kills, in the shape of Kafka's StreamsEosTest.

Three join workers, two scoring workers, a hinting and an aggregation worker run beside a driver, which also asks to
forget some of the sessions. Every turn of the rota does one thing to one of them (below), the broker is killed once and
restarted once. A worker that ends by itself must have a reason that the rota gave it (`tests.chaos.worker.Cause`): one
that crashes fails the run. Then everything may finish, all who left are forgotten with their rollouts, and verifiers
that share no code with the applications read the topics:

- the halves log folded by brute force says which rollouts and outcomes there must be, by key, content and digest;
- `tentalis.verify` says from the inputs whether every result and feedback has its half and every sample its outcome;
- outcomes and feedback, added up, say what the last signal of each window must be;
- no good record is among the dead letters, and of who was forgotten there are husks and nothing else.

    make chaos [DURATION=600] [TASKS=20000]

The last line on stdout is one JSON object: tasks, lost, wrong, duplicates, restarts, and what was done.
"""

import argparse
import json
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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Forget
from tentalis.config import Settings
from tentalis.forget.process import forget
from tentalis.kafka import NoSuchTopic, committed_offsets, end_offsets, make_codec, now_ms, read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.verify.model import Kind, Report
from tentalis.verify.reader import verify
from tests.chaos import aggregates, brute_force
from tests.chaos.driver import Driver, events_of, leaver_of
from tests.chaos.findings import Findings
from tests.chaos.promises import not_forgotten, wrongly_dead
from tests.chaos.worker import Cause, Worker
from tests.kafka_fixture import ensure_topics, eventually

FLEET = {"join-0": "join", "join-1": "join", "join-2": "join", "scoring-0": "scoring", "scoring-1": "scoring"}
FLEET |= {"hinting-0": "hinting", "aggregation-0": "aggregation"}
SESSIONS = 4
"""Conversations of which somebody leaves while the run goes on."""
TAKEOVER_S = 180.0
KINDS = frozenset({"kill", "stop", "freeze", "replace", "doze", "kill broker", "restart broker"})


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass
class Rota:
    """The fleet, and what is done to it."""

    broker: EmbeddedBroker
    folder: Path
    workers: dict[str, Worker] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    ended: Counter[Cause] = field(default_factory=Counter)
    restarts: int = 0

    def start(self, instance: str) -> None:
        self.workers[instance] = Worker(self.broker.bootstrap, self.folder, instance, FLEET[instance])

    def tend(self) -> None:
        """Starts again whoever ended by himself."""
        for instance in FLEET:
            if self._ended(self.workers[instance]):
                self._again(instance)

    def _ended(self, worker: Worker) -> bool:
        """Whether it ended by itself; then the cause is counted, once for each process."""
        if not worker.ended:
            return False
        cause, words = worker.cause()
        say(f"{worker.instance} ended by itself ({cause}): {words}")
        self.ended[cause] += 1
        return True

    def _again(self, instance: str) -> None:
        self.restarts += 1
        self.start(instance)

    def _at_work(self, instance: str) -> Worker:
        """The worker, once it is in its group: before, there is nobody to stop in order or to take over from."""

        def works() -> bool:
            self.tend()
            return self.workers[instance].owns_partitions

        eventually(works, TAKEOVER_S, 0.2, f"{instance} works")
        return self.workers[instance]

    def kill(self, instance: str) -> None:
        worker = self.workers[instance]
        if not self._ended(worker):
            worker.end(signal.SIGKILL)
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
        eventually(lambda: frozen.ended, TAKEOVER_S, 0.2, f"{instance} woke up and is fenced")

    def replace(self, instance: str) -> None:
        """A successor of the same name takes over from a frozen worker and lives on when that one wakes up."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        self._again(instance)
        try:
            self._at_work(instance)
            time.sleep(1.0)
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        eventually(lambda: self._ended(frozen), TAKEOVER_S, 0.2, f"{instance} woke up and is fenced")

    def doze(self, instance: str) -> None:
        """Frozen for longer than the group waits: its peers take over, and it wakes up among them."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        time.sleep(14.0)
        frozen.process.send_signal(signal.SIGCONT)

    def kill_broker(self, _: str) -> None:
        self.broker.kill()
        self.broker.start()
        self.broker.wait_ready(TAKEOVER_S)

    def restart_broker(self, _: str) -> None:
        self.broker.stop()
        self.broker.start()
        self.broker.wait_ready(TAKEOVER_S)

    def turns(self) -> list[tuple[str, Callable[[str], None], str]]:
        """One round of the rota."""
        return [
            ("kill", self.kill, "join-0"),
            ("stop", self.stop, "scoring-0"),
            ("freeze", self.freeze, "join-1"),
            ("kill", self.kill, "aggregation-0"),
            ("kill", self.kill, "scoring-1"),
            ("kill", self.kill, "hinting-0"),
            ("stop", self.stop, "join-2"),
            ("doze", self.doze, "join-0"),
            ("replace", self.replace, "join-2"),
            ("freeze", self.freeze, "aggregation-0"),
            ("kill", self.kill, "join-2"),
            ("freeze", self.freeze, "scoring-0"),
            ("replace", self.replace, "aggregation-0"),
            ("stop", self.stop, "aggregation-0"),
            ("stop", self.stop, "join-1"),
            ("kill", self.kill, "join-1"),
        ]

    def play(self, driver: Driver, seconds: float) -> None:
        """Turn after turn until everything is sent and every turn was taken once; the broker goes down at a third and
        at two thirds."""
        began, turns, taken = time.monotonic(), self.turns(), 0
        brokers: list[tuple[str, Callable[[str], None], float]]
        brokers = [("kill broker", self.kill_broker, 1 / 3), ("restart broker", self.restart_broker, 2 / 3)]
        while not driver.done or brokers or taken < len(turns):
            if brokers and time.monotonic() - began > brokers[0][2] * seconds:
                name, act, _ = brokers.pop(0)
                instance = ""
                self.restarts += 1
            else:
                name, act, instance = turns[taken % len(turns)]
                taken += 1
            say(f"{name} {instance} ({driver.sent} sent)")
            act(instance)
            self.done[name] += 1
            for _ in range(3):
                time.sleep(1.0)
                self.tend()

    def end(self) -> None:
        """Ends whoever still runs."""
        left = [worker for worker in self.workers.values() if not self._ended(worker)]
        for worker in left:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.terminate()
        for worker in left:
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
        broker.wait_ready(TAKEOVER_S)
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        for instance in FLEET:
            rota.start(instance)
        name = f"chaos-{seed}"
        events = partial(events_of, sessions=SESSIONS)
        driver = Driver(settings, name, tasks, seconds, seed, events=events, sessions=SESSIONS)
        driver.start()
        rota.play(driver, seconds)
        say(f"all is sent: {driver.sent} records; forgetting who left, and waiting for the rest")
        found = _leave(rota, settings, leaver_of(name))
        report = _settled(rota, settings, name)
        say("folding the logs by brute force")
        more, numbers = _verified(settings, driver.bad, leaver_of(name))
        found += more
    finally:
        rota.end()
        broker.stop()
    for line in (*map(str, report.problems[:20]), *found.lost[:20], *found.wrong[:20], *found.doubled[:20]):
        say(line)
    kinds = Counter(problem.kind for problem in report.problems)
    return {
        "tasks": report.numbers["tasks"],
        "lost": len(found.lost) + kinds[Kind.LOST] + kinds[Kind.OPEN],
        "wrong": len(found.wrong) + kinds[Kind.WRONG],
        "duplicates": len(found.doubled) + kinds[Kind.DUPLICATE],
        "restarts": rota.restarts,
        "done": dict(rota.done),
        "ended": dict(rota.ended),
        "seed": seed,
        "outcomes": report.outcomes,
        "numbers": report.numbers | numbers,
    }


def sound(report: dict[str, Any]) -> bool:
    """Whether nothing is wrong with what a run ended with."""
    return not (report["lost"] or report["wrong"] or report["duplicates"] or report["ended"].get(Cause.CRASH))


def _leave(rota: Rota, settings: Settings, user: str) -> Findings:
    """`tentalis forget --user`, while the applications still have work to do."""
    rota.tend()
    request = Forget(forget_id=derived_id("forget", user), event_time=now_ms(), user_id=user)
    report = forget(settings, request, wait=120.0)
    say(f"{user} is forgotten: {report.husks} husks")
    return Findings(wrong=[f"{group} did not forget on partitions {where}" for group, where in report.waiting.items()])


def _settled(rota: Rota, settings: Settings, name: str) -> Report:
    """Reads until nothing is open and all is added up, for five minutes at most."""
    deadline = time.monotonic() + 300
    while True:
        rota.tend()
        time.sleep(5.0)
        try:
            report = verify(settings, name)
            behind = _behind(settings, "tentalis-aggregation", (topics.OUTCOMES, topics.FEEDBACK))
        except (NoSuchTopic, TimeoutError, KafkaException) as error:
            say(f"cannot be read yet: {error}")
            continue
        waiting = Counter(problem.kind for problem in report.problems)
        if time.monotonic() > deadline or not (waiting[Kind.OPEN] or waiting[Kind.LOST] or behind):
            return report
        say(f"open {waiting[Kind.OPEN]}, not there yet {waiting[Kind.LOST]}, not added up {behind}")


def _behind(settings: Settings, group: str, names: tuple[str, ...]) -> int:
    """Records that a group has not committed."""
    committed = committed_offsets(settings, group, names)
    ends = {(name, p): end for name in names for p, end in end_offsets(settings, name).items()}
    return sum(end - committed.get(place, 0) for place, end in ends.items())


def _verified(settings: Settings, bad: set[bytes], user: str) -> tuple[Findings, dict[str, int]]:
    """What the verifiers of this folder find, and numbers that say that they had something to look at."""
    codec = make_codec(settings)

    def read(*names: str) -> Any:
        return chain.from_iterable(read_to_end(settings, name) for name in names)

    joined, writes = brute_force.differences(read(topics.HALVES), read(topics.ROLLOUTS, topics.OUTCOMES), codec)
    summed, totals = aggregates.differences(read(topics.OUTCOMES, topics.FEEDBACK), read(topics.META), codec)
    dead = wrongly_dead(read(*(name for name in topics.table().topics if name.endswith(".dlq"))), bad)
    left, husks = not_forgotten(read(topics.ROLLOUTS), user, codec)
    numbers = {"writes": writes, "buckets": len(totals.buckets), "corrected": totals.corrected, "husks": husks}
    return joined + summed + dead + left, numbers


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
    if sound(report) and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not sound(report):
        say(f"logs and data are in {folder}")
    print(json.dumps(report))
    return 0 if sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
