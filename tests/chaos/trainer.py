"""Poisons and kills a trainer (`make chaos-trainer`): hostile rollouts beside honest ones, kill -9 at random.

Every second start plans like a release without bounds, so that poison reaches the steps. At the end every honest
rollout must be trained, every other one dropped with a reason or dead-lettered, and a replay must give the same bytes.
The last line on stdout is one JSON object; the exit code is 1 if anything failed. `stuck_s`: the longest time without a
step, as seen every few seconds; a full batch is always on the log. A run without a step, a kill or poison in a step
shows nothing and fails.

    make chaos-trainer [DURATION=1800] [SEED=0]
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.records import Rollout
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.ops.verify import Log, LoggedRecord, check
from tentalis.ops.verify.reader import _dead
from tentalis.service.settings import Settings
from tests.chaos.fault_schedule import say
from tests.support import forked
from tests.support.hostile_rollouts import hostile
from tests.support.kafka_fixture import ensure_topics
from tests.support.trainer_lab import config, rollouts, tiny_model
from trainer.config.trainer_config import config_text
from trainer.data.fetch import readable_rollouts
from trainer.run.run_log import RunLog, read_run

RUN, POLICY = "chaos", "tiny"
POINTS = (
    "gradient {n}",
    "commit BatchPlan {n}",
    "committed BatchPlan {n}",
    "save {n}",
    "saved {n}",
    "commit StepResult {n}",
    "publish {n}",
    # One step is being committed while the next one is computed. A poisoned one may never be stepped.
    "save {n} until gradient {next}",
    "saved {n} until committed BatchPlan {next}",
    "committed StepResult {n} until gradient {next}",
    "publish {n} until gradient {next}",
    "gradient {next} until committed StepResult {n}",
)
LIFTED = {"TENTALIS_DEAD_RUN": str(10**9), "TENTALIS_DEAD_RATIO": "1"}
STUCK_S = 300.0
RULES = ("untrained-", "drop-", "step-", "two-results", "result-", "plan-", "trained-", "manifest-", "policy-sha")


class PoisonedTrainer:
    """A trainer of a tiny model on its own broker, and the writer of its rollouts."""

    def __init__(self, folder: Path, seed: int, broker: EmbeddedBroker) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.settings = Settings(bootstrap=broker.bootstrap, home=folder / "home", cache=folder / "cache")
        ensure_topics(self.settings)
        self.codec = make_codec(self.settings)
        self.publisher = Publisher(self.settings, "chaos", self.codec)
        start = end_offsets(self.settings, topics.ROLLOUTS)
        settings = {"run_id": RUN, "policy": POLICY, "steps": None, "start": start, "max_staleness": 10**6}
        loss = {"step_coef": 10.0, "advantage": "group_mean_std"}
        run_config = config(tiny_model(folder / "model"), loss=loss, **settings)
        self.config_file = folder / "config.yaml"
        self.config_file.write_text(config_text(run_config))
        self.honest: dict[str, Rollout] = {}
        self.poisoned = self.kills = self.starts = self.groups = 0
        self._hostile = hostile("hostile-", POLICY, self.chance, self.codec)

    def write(self) -> None:
        """Two honest groups, one to six hostile records, and now and then an honest rollout for the second time."""
        made = rollouts(2, 4, seed=self.groups, prefix=f"honest-{self.groups}-", policy=POLICY)
        self.groups += 1
        self.honest |= {each.key: each for each in made}
        records: list[Any] = [*made, *(next(self._hostile) for _ in range(self.chance.randint(1, 6)))]
        self.poisoned += len(records) - len(made)
        if self.chance.random() < 0.3:
            records.append(self.chance.choice(list(self.honest.values())))
        self.chance.shuffle(records)
        for record in records:
            if isinstance(record, Rollout):
                self.publisher.send(topics.ROLLOUTS, record)
            else:
                self.publisher.send_bytes(topics.ROLLOUTS, record[0].encode(), record[1])
        self.publisher.flush()

    def start(self, *options: str) -> Any:
        self.starts += 1
        if self.starts % 2:
            options = (*options, "unbounded")
        log_file = self.folder / "trainer.log"
        argument = "\n".join((str(self.config_file), *options))
        return forked.start(forked.train, argument, self.environment(), log_file, log_file)

    def kill_point(self, step: int) -> str:
        """A point of one of the next steps. `step`: the last one on the log; the checkpoint of the one after it may be
        there, and is then announced before anything is computed beside it."""
        point = self.chance.choice(POINTS)
        n = step + self.chance.randint(2 if "until" in point else 1, 4)
        return f"SIGKILL at {point.format(n=n, next=n + 1)}"

    def environment(self) -> dict[str, str]:
        return (
            os.environ
            | LIFTED
            | {
                "TENTALIS_BOOTSTRAP": self.settings.require_bootstrap(),
                "TENTALIS_HOME": str(self.settings.home),
                "TENTALIS_CACHE": str(self.settings.cache),
            }
        )

    def last_step(self) -> int:
        return read_run(self.settings, self.codec, RUN).last_step


def run(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Runs the schedule, and returns the report; `problems` names what is wrong."""
    port = free_port()
    broker = EmbeddedBroker(folder / "kafka", port, free_port(avoid=(port,)))
    broker.start()
    broker.wait_ready(120)
    lab = PoisonedTrainer(folder, seed, broker)
    forked.preload()
    process, problems, stuck_s = None, [], 0.0
    try:
        end, step, moved = time.monotonic() + seconds, -1, time.monotonic()
        while time.monotonic() < end:
            lab.write()
            if process is None:
                process = lab.start(*([lab.kill_point(step)] if lab.chance.random() < 0.7 else []))
            process.join(lab.chance.uniform(1.0, 8.0))
            if process.exitcode is None and lab.chance.random() < 0.15:
                process.kill()
                process.join()
            if process.exitcode is not None:
                lab.kills += process.exitcode == -9
                if process.exitcode != -9:
                    problems.append(f"the trainer ended by itself with exit code {process.exitcode}")
                process = None
            stuck_s = max(stuck_s, time.monotonic() - moved)
            if (now_at := lab.last_step()) > step:
                step, moved = now_at, time.monotonic()
            say(f"step {step}, {lab.poisoned} hostile, {lab.kills} kills")
            if problems or stuck_s > STUCK_S:
                break
        if process is not None:
            forked.end(process)
        process = lab.start("caught_up")
        process.join(STUCK_S)
        if process.exitcode != 0:
            problems.append(f"the last trainer ended with {process.exitcode}, not with 0 when it had caught up")
        report = judged(lab, problems) | {"stuck_s": round(stuck_s, 1)}
    finally:
        if process is not None:
            forked.end(process)
        broker.stop()
    problems += [f"stuck for {stuck_s:.0f} s"] * (stuck_s > STUCK_S)
    return report | {"problems": problems}


def judged(lab: PoisonedTrainer, problems: list[str]) -> dict[str, Any]:
    """Compares the log with what was written; replays the run."""
    log, recorded = Log(RUN), read_run(lab.settings, lab.codec, RUN)
    for name, records in (
        ("manifests", recorded.manifests.values()),
        ("plans", recorded.plans.values()),
        ("steps", recorded.results.values()),
        ("updates", recorded.updates.values()),
    ):
        getattr(log, name).extend(LoggedRecord(record, "t", 0, offset, 0) for offset, record in enumerate(records))
    letters = _dead(lab.settings, topics.ROLLOUTS)
    values = {stored.place: stored.value for stored in read_to_end(lab.settings, topics.ROLLOUTS)}
    log.dead |= {place for place, value in letters.items() if values.get(place) == value}
    for stored, record in readable_rollouts(lab.settings, lab.codec):
        log.rollouts.append(LoggedRecord(record, stored.topic, stored.partition, stored.offset, 0))
    problems += [str(each) for each in check(log).problems if each.rule.startswith(RULES)]
    attempts = {(result.step, result.attempt) for result in recorded.results.values()}
    plans = [plan for place, plan in recorded.plans.items() if place in attempts]
    trained = {row.rollout_id for plan in plans for row in plan.rows}
    low_water = {p.partition: p.offset for p in plans[-1].low_water} if plans else {}
    dropped = [
        logged.record.key
        for logged in log.rollouts
        if logged.record.key in lab.honest.keys() - trained and logged.offset < low_water.get(logged.partition, 0)
    ]
    problems += [f"honest, but not trained: {key}" for key in dropped]
    out, err = lab.folder / "replay.json", lab.folder / "replay.log"
    process = forked.start(forked.replay, RUN, lab.environment(), out, err)
    process.join(600 + 2 * recorded.last_step)
    forked.end(process)
    equal = process.exitcode == 0 and json.loads(out.read_text())["equal"] is True
    problems += [] if equal else [f"the replay ended with {process.exitcode}, see {err}"]
    problems += unshown(recorded, lab.kills)
    say(f"{lab.kills} kills, {len(log.dead)} dead letters, attempts: {len(recorded.plans)} for {len(plans)} steps")
    return {
        "steps": recorded.last_step,
        "poisoned": lab.poisoned,
        "dropped_honest": len(dropped),
        "replay_equal": equal,
    }


def unshown(recorded: RunLog, kills: int) -> list[str]:
    """Returns what did not happen in the run, so that its end shows nothing about it."""
    happened = {
        "the trainer made no step": recorded.last_step > 0,
        "the trainer was never killed": kills > 0,
        "no poison reached a step: no plan has a second attempt": any(attempt > 1 for _, attempt in recorded.plans),
    }
    return [what for what, seen in happened.items() if not seen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-trainer-"))
    report = run(folder, options.seconds, options.seed)
    for problem in report["problems"]:
        say(problem)
    if report["problems"]:
        say(f"logs: {folder}")
    names = ("steps", "poisoned", "dropped_honest", "stuck_s", "replay_equal")
    print(json.dumps({name: report[name] for name in names}))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
