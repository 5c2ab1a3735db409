"""The trainer: its checkpoints, its model, its topic."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.digest import with_digest
from schemas.ids import policy_name
from schemas.records import Rollout
from tentalis.local.ports import free_port
from tests.drill.alerts import runbook
from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.inference_lab import make_model
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.recreated import recreate
from tests.support.trainer_lab import rollouts, tiny_model

STOPS = "training-stops.md"
LOST = "lost-topics.md"
SERVED = 'tentalis_trainer_waiting{reason="served"} 1.0'
STALE = 'tentalis_trainer_drops_total{reason="stale"}'


class Run:
    """A run of a tiny model with `steps` steps done, and room for `more`."""

    def __init__(self, bench: Bench, name: str, steps: int = 2, more: int = 1, **settings: Any) -> None:
        model = bench.folder / "tiny"
        if not model.exists():
            tiny_model(model)
        self.lab = Lab(Kafka(bench.broker.bootstrap, "given"), f"drill-{name}", bench.folder, model)
        self.bench = bench
        self.lab.put_groups(2 * (steps + more))
        self.config = self.lab.config(steps=steps + more, **settings)
        code = self.lab.train(self.config, f"steps={steps}")
        assert code == 0, f"the trainer ended with {code}: {self.lab.log_text(self.config)[-3000:]}"
        bench.shell.env |= {"RUN": self.config.run_id, "CONFIG": str(self.lab.write_config(self.config))}
        bench.shell.env["POLICY"] = self.lab.policy

    def put_others(self, groups: int, version: int = 0, name: str = "other") -> None:
        """Writes rollouts of other tasks: a known id with other content would count as forged."""
        made = rollouts(groups, policy=self.lab.policy, prefix=f"{self.lab.policy}-{name}-", seed=1)
        self.lab.put(*(sampled_from(each, version) for each in made))

    def again(self) -> Sight:
        """Starts the trainer as an operator does."""
        return self.bench.shell.run("tentalis train --config $CONFIG")

    def begin(self) -> subprocess.Popen[bytes]:
        """Starts the trainer in the background, with metrics."""
        port = free_port()
        log = self.bench.folder / f"{self.config.run_id}.log"
        self.metrics = f"curl -s http://127.0.0.1:{port}/metrics"
        process = self.bench.shell.begin(f"tentalis train --config $CONFIG --metrics-port {port}", log)
        self.bench.shell.env |= {"METRICS_PORT": str(port), "PID": str(process.pid)}
        return process

    def waits_for_serving(self) -> Sight:
        """Waits until the trainer waits for a served version; its metrics of that."""
        shown = f"{self.metrics} | grep '^tentalis_trainer_waiting'"

        def waits() -> bool:
            return SERVED in self.bench.shell.run(shown).says

        eventually(waits, 180, 0.5, lambda: self.lab.log_text(self.config)[-3000:])
        return self.bench.shell.run(shown)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, the newest last."""
        return sorted((self.lab.settings.home / "checkpoints" / self.config.run_id).glob("0*"))

    def done(self, steps: int) -> None:
        """Checks that each step was trained, each to another adapter."""
        assert len(set(self.lab.hashes(self.config))) == steps + 1


def sampled_from(one: Rollout, version: int) -> Rollout:
    """Returns the rollout as if this version of its policy had sampled it."""
    (span,) = one.policy_spans
    of = span.model_copy(update={"policy": policy_name(one.head.policy, version)})
    return with_digest(one.model_copy(update={"policy_spans": (of,)}))


@fault("bench", STOPS, code=0, says="optimizer.safetensors has another sha256 than in state.json")
def a_damaged_checkpoint(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "damaged")
    file = run.checkpoints[-1] / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    seen = bench.shell.run("tentalis doctor")
    assert f"{file} has another sha256 than in state.json" in seen.says, seen
    yield run.again()
    run.done(3)


@fault("bench", STOPS, code=0, says="is no checkpoint of step 2 that belongs to the log")
def a_missing_checkpoint(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "missing")
    shutil.rmtree(run.checkpoints[-1])
    yield run.again()
    run.done(3)


@fault("bench", STOPS, code=7, says="Restore these settings or a checkpoint")
def changed_settings_without_a_checkpoint(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "changed")
    config = Path(bench.shell.env["CONFIG"])
    shutil.copy(config, bench.folder / "run.before.yaml")
    config.write_text(config.read_text().replace("seed: 0", "seed: 1") + "\n")
    if "seed: 1" not in config.read_text():
        config.write_text(config.read_text() + "seed: 1\n")
    for checkpoint in run.checkpoints:
        shutil.rmtree(checkpoint)
    yield run.again()
    run.done(3)


@fault("bench", STOPS, code=5, says="tentalis groups skip tentalis-trainer-drill-garbage")
def garbage_before_the_trainer(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "garbage", steps=1)
    for partition in range(8):
        bench.work.garbage(topics.ROLLOUTS, 150, partition)
    run.put_others(3)
    yield run.again()
    run.done(2)


@fault("bench", LOST, code=7, says=f"{topics.ROLLOUTS} was deleted and created again")
def lost_rollouts(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "lost")
    bench.work.verify_until_now()
    recreate(bench.settings, topics.ROLLOUTS)
    run.put_others(3)
    yield run.again()
    run.done(3)


@fault("bench", LOST, code=7, says=f"{topics.ROLLOUTS} was deleted and created again")
def lost_rollouts_that_are_restored(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "restored")
    bench.shell.env["ARCHIVE"] = str(bench.folder / "archive")
    exported = bench.shell.run("tentalis export $RUN --into $ARCHIVE")
    assert exported.code == 0, exported.says
    bench.work.verify_until_now()
    recreate(bench.settings, topics.ROLLOUTS)
    run.put_others(3)
    yield run.again()
    run.done(3)


@fault("bench", LOST, code=7, says=f"trainer: {topics.ROLLOUTS} was deleted and created again")
def lost_rollouts_of_another_machine(bench: Bench) -> Iterator[Sight]:
    """The checkpoints are not below TENTALIS_HOME, so only the record of topic ids tells a command of the loss."""
    run = Run(bench, "elsewhere")
    bench.work.verify_until_now()
    recreate(bench.settings, topics.ROLLOUTS)
    run.put_others(3)
    empty = bench.folder / "empty"
    empty.mkdir()
    doctor = bench.shell.run(f"TENTALIS_HOME={empty} tentalis doctor")
    status = bench.shell.run(f"TENTALIS_HOME={empty} tentalis status")
    for seen in (doctor, status):
        assert seen.code == 1 and f"{topics.ROLLOUTS} was deleted and created again" in seen.says, seen
    bench.shell.env["EMPTY"] = str(empty)
    yield bench.shell.run(f"TENTALIS_HOME={empty} tentalis topics diff")
    run.done(3)


@fault("bench", STOPS, code=7, says="model.safetensors")
def a_truncated_model(bench: Bench) -> Iterator[Sight]:
    folder = bench.folder / "cut"
    make_model(folder)
    shutil.copytree(folder, bench.folder / "backup")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    bench.shell.env |= {"MODEL": str(folder), "BACKUP": str(bench.folder / "backup")}
    yield bench.shell.run("tentalis serve model --port 0 --policy-model $MODEL")


@fault("bench", runbook("trainer-waits-for-serving"), code=0, says=SERVED)
def a_trainer_ahead_of_the_served_version(bench: Bench) -> Iterator[Sight]:
    """A person is to promote, and nobody has."""
    run = Run(bench, "ahead", steps=1, max_staleness=1, promotion="manual")
    trainer = run.begin()
    yield run.waits_for_serving()
    assert trainer.wait(180) == 0, run.lab.log_text(run.config)[-3000:]
    run.done(2)


@fault("bench", runbook("trainer-drops"), code=0, says=f"{STALE} 16.0")
def rollouts_that_are_too_old(bench: Bench) -> Iterator[Sight]:
    """A run that trains on nothing but rollouts of its newest version, and twice as many of an older one."""
    run = Run(bench, "stale", steps=1, more=2, max_staleness=0)
    promoted = bench.shell.run("tentalis policy promote $POLICY@v1 --yes")
    assert promoted.code == 0, promoted.says
    run.put_others(2, version=1, name="new")
    trainer = run.begin()
    run.waits_for_serving()  # step 2 is trained
    run.put_others(2)
    yield bench.shell.run(f"{run.metrics} | grep -E '^tentalis_trainer_(drops|rollouts)_total'")
    bench.shell.end(trainer)
    run.done(3)
    dropped = {
        step: sum(drop.count for drop in plan.drops) for (step, _), plan in run.lab.run_log(run.config).plans.items()
    }
    assert dropped == {1: 0, 2: 16, 3: 0}, dropped
