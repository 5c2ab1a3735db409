"""Stream applications under a fixed schedule of starts, stops, freezes and kills, modelled on Kafka's StreamsEosTest.

Three join workers, two scoring workers, a hinting and an aggregation worker run beside a driver, which also sends
requests to forget some of the sessions. Each turn of the schedule does one thing to one worker (below); the broker is
killed once and restarted once. A worker that ends by itself must have a cause that the schedule explains
(`tests.chaos.worker.Cause`): a crash fails the run. Then the applications finish their work, the user is forgotten with
all rollouts, and verifiers that share no code with the applications read the topics:

- The halves log, folded by brute force, yields the expected rollouts and outcomes: key, content and digest.
- `tentalis.ops.verify` checks from the inputs that every result and feedback has its half and every sample its outcome.
- The sums of outcomes and feedback yield the expected last signal of each window.
- No valid record is among the dead letters, and a forgotten user has only redacted rollouts.

    make chaos [DURATION=600] [TASKS=20000]

The last line on stdout is one JSON object: tasks, lost, wrong, duplicates, restarts, and the turns taken.
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
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.forget.process import forget
from tentalis.ops.verify.model import ProblemKind, VerifyReport
from tentalis.ops.verify.reader import verify
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.chaos import aggregates, brute_force
from tests.chaos.driver import Driver, events_of, leaver_of
from tests.chaos.findings import Findings
from tests.chaos.promises import not_forgotten, wrongly_dead
from tests.chaos.worker import Cause, Worker
from tests.support.kafka_fixture import ensure_topics, eventually, new_broker

FLEET = {"join-0": "join", "join-1": "join", "join-2": "join", "scoring-0": "scoring", "scoring-1": "scoring"}
FLEET |= {"hinting-0": "hinting", "aggregation-0": "aggregation"}
AGGREGATION = topology.named("aggregation")
SESSIONS = 4
"""Number of sessions that are forgotten during the run."""
TAKEOVER_S = 180.0
KINDS = frozenset({"kill", "stop", "freeze", "replace", "doze", "kill broker", "restart broker"})


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass
class FaultSchedule:
    """The worker processes, and the faults injected into them."""

    broker: EmbeddedBroker
    folder: Path
    workers: dict[str, Worker] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    ended: Counter[Cause] = field(default_factory=Counter)
    restarts: int = 0

    def start(self, instance: str) -> None:
        self.workers[instance] = Worker(self.broker.bootstrap, self.folder, instance, FLEET[instance])

    def tend(self) -> None:
        """Restarts the workers that ended by themselves."""
        for instance in FLEET:
            if self._ended(self.workers[instance]):
                self._again(instance)

    def _ended(self, worker: Worker) -> bool:
        """True if the worker ended by itself; then counts the cause, once for each process."""
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
        """Waits until the worker owns partitions, and returns it: only then can it be stopped in order or replaced."""

        def works() -> bool:
            self.tend()
            return self.workers[instance].owns_partitions

        eventually(works, TAKEOVER_S, 0.2, f"{instance} owns no partitions")
        return self.workers[instance]

    def kill(self, instance: str) -> None:
        worker = self.workers[instance]
        if not self._ended(worker):
            worker.end(signal.SIGKILL)
        self._again(instance)

    def stop(self, instance: str) -> None:
        """Stops a worker with SIGTERM: it must end with exit code 0 or 143."""
        worker = self._at_work(instance)
        code = worker.end(signal.SIGTERM)
        if code not in (0, 143):
            raise AssertionError(f"{instance} was asked to stop and ended with {code}: see {worker.log}")
        self._again(instance)

    def freeze(self, instance: str) -> None:
        """Freezes a worker until a successor with its name has taken over and was killed; then wakes it up."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        successor = Worker(self.broker.bootstrap, self.folder, instance, FLEET[instance])
        try:
            eventually(
                lambda: successor.owns_partitions, TAKEOVER_S, 0.2, f"the successor of {instance} owns no partitions"
            )
            time.sleep(1.0)
        finally:
            successor.end(signal.SIGKILL)
            frozen.process.send_signal(signal.SIGCONT)
        self.restarts += 1
        # It is fenced and must end by itself; `tend` restarts it.
        eventually(lambda: frozen.ended, TAKEOVER_S, 0.2, f"{instance} woke up and was not fenced")

    def replace(self, instance: str) -> None:
        """Freezes a worker until a successor with its name has taken over; wakes it up while the successor runs."""
        frozen = self._at_work(instance)
        frozen.process.send_signal(signal.SIGSTOP)
        self._again(instance)
        try:
            self._at_work(instance)
            time.sleep(1.0)
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        eventually(lambda: self._ended(frozen), TAKEOVER_S, 0.2, f"{instance} woke up and was not fenced")

    def doze(self, instance: str) -> None:
        """Freezes a worker for longer than the session timeout: its peers take over, and then it wakes up."""
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
        """One round of the schedule. Those that come last repeat a fault of an application."""
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
            ("freeze", self.freeze, "scoring-0"),
            ("replace", self.replace, "aggregation-0"),
            ("stop", self.stop, "aggregation-0"),
            ("kill", self.kill, "join-2"),
            ("stop", self.stop, "join-1"),
            ("kill", self.kill, "join-1"),
        ]

    def play(self, driver: Driver, seconds: float) -> None:
        """Takes turns until all records are sent and every application had each of its faults once; the broker goes
        down at one third and at two thirds of the time."""
        began, turns, taken = time.monotonic(), self.turns(), 0
        faults = {(name, FLEET[instance]) for name, _, instance in turns}
        brokers: list[tuple[str, Callable[[str], None], float]]
        brokers = [("kill broker", self.kill_broker, 1 / 3), ("restart broker", self.restart_broker, 2 / 3)]
        while not driver.done or brokers or taken < len(faults):
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
        """Ends all workers that still run."""
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
    """Runs the experiment and returns the report."""
    broker = new_broker(folder / "kafka")
    broker.start()
    schedule = FaultSchedule(broker, folder)
    try:
        broker.wait_ready(TAKEOVER_S)
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        for instance in FLEET:
            schedule.start(instance)
        name = f"chaos-{seed}"
        events = partial(events_of, sessions=SESSIONS)
        driver = Driver(settings, name, tasks, seconds, seed, events=events, sessions=SESSIONS)
        driver.start()
        schedule.play(driver, seconds)
        say(f"all {driver.sent} records are sent; forgetting the user, and waiting for the applications")
        found = _leave(schedule, settings, leaver_of(name))
        report = _settled(schedule, settings, name)
        say("verifying the logs by brute force")
        more, numbers = _verified(settings, driver.bad, leaver_of(name))
        found += more
    finally:
        schedule.end()
        broker.stop()
    for line in (*map(str, report.problems[:20]), *found.lost[:20], *found.wrong[:20], *found.doubled[:20]):
        say(line)
    kinds = Counter(problem.kind for problem in report.problems)
    return {
        "tasks": report.numbers["tasks"],
        "lost": len(found.lost) + kinds[ProblemKind.LOST] + kinds[ProblemKind.OPEN],
        "wrong": len(found.wrong) + kinds[ProblemKind.WRONG],
        "duplicates": len(found.doubled) + kinds[ProblemKind.DUPLICATE],
        "restarts": schedule.restarts,
        "done": dict(schedule.done),
        "ended": dict(schedule.ended),
        "seed": seed,
        "outcomes": report.outcomes,
        "numbers": report.numbers | numbers,
    }


def sound(report: dict[str, Any]) -> bool:
    """True if the report shows no failure."""
    return not (report["lost"] or report["wrong"] or report["duplicates"] or report["ended"].get(Cause.CRASH))


def _leave(schedule: FaultSchedule, settings: Settings, user: str) -> Findings:
    """Does `tentalis forget --user` while the applications still have work to do."""
    schedule.tend()
    request = Forget(forget_id=derived_id("forget", user), event_time=now_ms(), user_id=user)
    report = forget(settings, request, wait=120.0)
    say(f"{user} is forgotten: {report.husks} redacted rollouts")
    return Findings(wrong=[f"{group} did not forget on partitions {where}" for group, where in report.waiting.items()])


def _settled(schedule: FaultSchedule, settings: Settings, name: str) -> VerifyReport:
    """Reads until no sample is open and aggregation has no lag, for at most five minutes."""
    deadline = time.monotonic() + 300
    while True:
        schedule.tend()
        time.sleep(5.0)
        try:
            report = verify(settings, name)
            behind = _behind(settings, AGGREGATION.consumer_group(), AGGREGATION.consumes)
        except (NoSuchTopic, TimeoutError, KafkaException) as error:
            say(f"the topics cannot be read yet: {error}")
            continue
        waiting = Counter(problem.kind for problem in report.problems)
        if time.monotonic() > deadline or not (waiting[ProblemKind.OPEN] or waiting[ProblemKind.LOST] or behind):
            return report
        say(f"{waiting[ProblemKind.OPEN]} open, {waiting[ProblemKind.LOST]} missing, {behind} records not aggregated")


def _behind(settings: Settings, group: str, names: tuple[str, ...]) -> int:
    """The number of records that a group has not committed."""
    committed = committed_offsets(settings, group, names)
    ends = {(name, p): end for name in names for p, end in end_offsets(settings, name).items()}
    return sum(end - committed.get(place, 0) for place, end in ends.items())


def _verified(settings: Settings, bad: set[bytes], user: str) -> tuple[Findings, dict[str, int]]:
    """The findings of this folder's verifiers, and counts that show that they had records to verify."""
    codec = make_codec(settings)

    def read(*names: str) -> Any:
        return chain.from_iterable(read_to_end(settings, name) for name in names)

    joined, writes = brute_force.differences(read(topics.HALVES), read(topics.ROLLOUTS, topics.OUTCOMES), codec)
    summed, totals = aggregates.differences(read(topics.OUTCOMES, topics.FEEDBACK), read(topics.META), codec)
    dead = wrongly_dead(read(*(name for name in topics.table().topics if name.endswith(".dlq"))), bad)
    left, redacted = not_forgotten(read(topics.ROLLOUTS), user, codec)
    numbers = {"writes": writes, "buckets": len(totals.buckets), "corrected": totals.corrected, "husks": redacted}
    return joined + summed + dead + left, numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds for which the driver sends")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--keep", type=Path, help="folder in which logs and data are kept; default: a temporary one")
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
