"""The trainer: its checkpoints, its model, its topic."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from schemas import topics
from tests.drill.bench import Bench, recreate
from tests.drill.fault import Sight, fault
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.inference_lab import make_model
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import rollouts, tiny_model

STOPS = "training-stops.md"
LOST = "lost-topics.md"


class Run:
    """A run of a tiny model with `steps` steps done, and room for `more`."""

    def __init__(self, bench: Bench, name: str, steps: int = 2, more: int = 1) -> None:
        model = bench.folder / "tiny"
        if not model.exists():
            tiny_model(model)
        self.lab = Lab(Kafka(bench.broker.bootstrap, "given"), f"drill-{name}", bench.folder, model)
        self.bench = bench
        self.lab.put_groups(2 * (steps + more))
        self.config = self.lab.config(steps=steps + more)
        code = self.lab.train(self.config, f"steps={steps}")
        assert code == 0, f"the trainer ended with {code}: {self.lab.log_text(self.config)[-3000:]}"
        bench.shell.env |= {"RUN": self.config.run_id, "CONFIG": str(self.lab.write_config(self.config))}
        bench.shell.env["POLICY"] = self.lab.policy

    def put_others(self, groups: int) -> None:
        """Writes rollouts of other tasks: a known id with other content would count as forged."""
        self.lab.put(*rollouts(groups, policy=self.lab.policy, prefix=f"{self.lab.policy}-other-", seed=1))

    def again(self) -> Sight:
        """Starts the trainer as an operator does."""
        return self.bench.shell.run("tentalis train --config $CONFIG")

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, the newest last."""
        return sorted((self.lab.settings.home / "checkpoints" / self.config.run_id).glob("0*"))

    def done(self, steps: int) -> None:
        """Checks that each step was trained, each to another adapter."""
        assert len(set(self.lab.hashes(self.config))) == steps + 1


@fault("bench", STOPS, code=0, says="optimizer.safetensors has another sha256 than in state.json")
def a_damaged_checkpoint(bench: Bench) -> Iterator[Sight]:
    run = Run(bench, "damaged")
    file = run.checkpoints[-1] / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
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
    bench.work.verify_so_far()
    recreate(bench.settings, topics.ROLLOUTS)
    run.put_others(3)
    yield run.again()
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
