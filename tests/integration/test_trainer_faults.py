"""What goes wrong when a run is resumed, on a real broker: killed at every commit step, frozen, moved, made smaller.

The table of faults, and where each is shown, is in docs/trainer.md.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from schemas import topics
from schemas.ids import sha256_hex
from schemas.records import PolicyUpdate
from tentalis.kafka import read_to_end
from tests import forked
from tests.integration.test_trainer_run import Lab
from tests.kafka_fixture import Kafka, eventually
from tests.trainer_lab import tiny_model
from trainer.config import TrainerConfig
from trainer.runlog import RunLog

pytestmark = pytest.mark.broker

# One process each, in the order in which a step is committed. A step that was cut is finished by the next process,
# which is then cut further on.
CUTS = (
    "save 0",
    "saved 0",
    "commit BatchPlan 1",
    "committed BatchPlan 1",
    "gradient 1",
    "stepped 1",
    "save 1",
    "saved 1",
    "commit StepResult 1",
    "committed StepResult 1",
    "publish 1",
    "published 1",
    "commit PolicyUpdate 1",
    "committed PolicyUpdate 2",
    "offsets 3",
)
STEPS = 4
PATIENCE = 180  # seconds, on a machine that does other things too


@contextmanager
def trainer(
    lab: Lab, of: TrainerConfig, name: str, *by_hand: str, **environment: str
) -> Iterator[tuple[ForkServerProcess, Path]]:
    """A trainer of its own, and what it says."""
    said = lab.folder / f"{of.run_id}-{name}.log"
    argument = "\n".join((str(lab.written(of)), *by_hand))
    process = forked.start(forked.train, argument, lab.environment() | environment, said, said)
    try:
        yield process, said
    finally:
        forked.end(process)


def ended(lab: Lab, of: TrainerConfig, name: str, *by_hand: str) -> tuple[int | None, str]:
    """How a trainer ended, and what it said."""
    with trainer(lab, of, name, *by_hand) as (process, said):
        process.join(PATIENCE)
        return process.exitcode, said.read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, model: Path) -> Lab:
    return Lab(kafka, unique, tmp_path, model)


@dataclass(frozen=True)
class Killed:
    """A run that was killed at every cut, and one over the same rollouts that was left alone."""

    lab: Lab
    of: TrainerConfig
    calm_of: TrainerConfig
    run: RunLog
    calm: RunLog


@pytest.fixture(scope="module")
def killed(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    lab = Lab(kafka, f"killed-{os.urandom(4).hex()}", folder, model)
    lab.lay(2 * STEPS + 1)
    of, calm = lab.config("killed", steps=STEPS), lab.config("calm", steps=STEPS)
    for number, cut in enumerate(CUTS):
        code, said = ended(lab, of, f"{number:02d}", f"SIGKILL at {cut}")
        assert code == -signal.SIGKILL, f"not killed at {cut}: {code}\n{said}"
    for config in (of, calm):
        code, said = ended(lab, config, "last")
        assert code == 0, said
    return Killed(lab, of, calm, lab.log(of), lab.log(calm))


def rows_of(run: RunLog) -> list[list[tuple[str, str, int]]]:
    plans = (run.latest_plan(step) for step in range(1, STEPS + 1))
    return [[(row.rollout_id, row.digest, row.micro_batch) for row in plan.rows] for plan in plans if plan is not None]


def test_fault_01_a_run_killed_at_every_commit_step_trains_each_batch_once_to_the_same_bytes(killed: Killed) -> None:
    assert killed.lab.hashes(killed.of) == killed.lab.hashes(killed.calm_of)
    assert len(set(killed.lab.hashes(killed.of))) == STEPS + 1
    assert rows_of(killed.run) == rows_of(killed.calm)
    trained = [key for rows in rows_of(killed.run) for key, _, _ in rows]
    assert len(trained) == len(set(trained)) == 8 * STEPS
    assert {attempt for _, attempt in killed.run.plans} == {1}, "a plan that is on the log is executed as it stands"
    code, report = killed.lab.replay(killed.of)
    assert (code, report["equal"], len(report["steps"])) == (0, True, STEPS + 1), report


def test_fault_04_in_flight_rollouts_keep_the_version_that_sampled_them(killed: Killed) -> None:
    """They waited through every restart, and are as many steps behind as they are."""
    behind = [killed.run.results[step, 1].metrics["staleness_mean"] for step in range(1, STEPS + 1)]
    assert behind == [0.0, 1.0, 2.0, 3.0]


def test_fault_08_fault_09_every_step_after_a_restart_has_the_same_loss_to_the_bit(killed: Killed) -> None:
    for step in range(1, STEPS + 1):
        ours, theirs = killed.run.results[step, 1].metrics, killed.calm.results[step, 1].metrics
        differ = {name for name, value in ours.items() if value != theirs[name]}
        assert not {name for name in differ if not name.startswith("staleness")}, "the calm run has later versions"
        assert ours["rl_loss"] != 0.0 and ours["grad_norm"] > 0.0


def test_fault_07_a_version_has_one_content_however_often_it_is_published(killed: Killed) -> None:
    lab, run = killed.lab, killed.run
    on_the_log: dict[int, list[str]] = {}
    for stored in read_to_end(lab.settings, topics.POLICIES):
        record = stored.decode(lab.codec) if stored.key is not None and stored.key.startswith(lab.policy) else None
        if isinstance(record, PolicyUpdate) and record.run_id == killed.of.run_id:
            on_the_log.setdefault(record.version, []).append(record.sha256)
    assert on_the_log == {step: [sha256] for step, sha256 in enumerate(lab.hashes(killed.of))}
    for version, update in sorted(run.updates.items()):
        weights = Path(update.location.removeprefix("file://")) / "adapter_model.safetensors"
        assert sha256_hex(weights.read_bytes()) == update.sha256, f"v{version}"


def test_fault_06_fault_07_a_trainer_that_lost_its_newest_checkpoint_does_not_begin_again(killed: Killed) -> None:
    """Servers have its last version already: another step of that number would be another adapter of that name."""
    lab = killed.lab
    home = lab.folder / "restored"
    shutil.copytree(lab.settings.home, home)
    (newest,) = (home / "checkpoints" / killed.of.run_id).glob(f"{STEPS:06d}-*")
    shutil.rmtree(newest)
    before = lab.log(killed.of)
    with trainer(lab, killed.of, "restored", TENTALIS_HOME=str(home)) as (process, said):
        process.join(PATIENCE)
        assert process.exitcode not in (0, None), said.read_text()
        assert f"the log has a result for step {STEPS}" in said.read_text()
        assert f"is of step {STEPS - 1}" in said.read_text()
    assert lab.log(killed.of) == before


def test_fault_05_fault_07_zombies_write_nothing_and_a_restart_goes_no_further_ahead(lab: Lab) -> None:
    """Rank 0 is frozen with its plan, its checkpoint, its policy ready to be written; each time another takes over."""
    lab.lay(9)
    of = lab.config(steps=None, max_staleness=2)
    waits = "waits: step 2 is trained, 2 steps beyond what is served: nothing is"
    with (
        trainer(lab, of, "a", "SIGSTOP at commit BatchPlan 1") as a,
        trainer_after(lab, of, a, "b", "SIGSTOP at stepped 1") as b,
        trainer_after(lab, of, b, "c", "SIGSTOP at save 1") as c,
        trainer_after(lab, of, c, "d", "SIGSTOP at commit PolicyUpdate 1") as d,
        trainer_after(lab, of, d, "e") as e,
    ):
        eventually(lambda: waits in e[1].read_text(), PATIENCE, message=e[1].read_text)
        before, on_disk = lab.log(of), files_of(lab, of)
        assert (before.last_step, sorted(before.plans)) == (2, [(1, 1), (2, 1)])
        for process, said in (a, b, c, d):
            os.kill(process.pid or 0, signal.SIGCONT)
            process.join(PATIENCE)
            assert process.exitcode not in (0, None), said.read_text()
            assert "another trainer of the policy" in said.read_text()
        assert lab.log(of) == before
        assert files_of(lab, of) == on_disk
        assert e[0].is_alive(), e[1].read_text()
    with trainer(lab, of, "f") as (_, said):
        eventually(lambda: waits in said.read_text(), PATIENCE, message=said.read_text)
    assert lab.log(of) == before


@contextmanager
def trainer_after(
    lab: Lab, of: TrainerConfig, frozen: tuple[ForkServerProcess, Path], name: str, *by_hand: str
) -> Iterator[tuple[ForkServerProcess, Path]]:
    """A trainer that is started once another one stands still."""
    status = Path(f"/proc/{frozen[0].pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", PATIENCE, message=frozen[1].read_text)
    with trainer(lab, of, name, *by_hand) as started:
        yield started


def files_of(lab: Lab, of: TrainerConfig) -> dict[str, tuple[int, int]]:
    """Every checkpoint and adapter of the policy: which files they are, and when they were written."""
    found: dict[str, tuple[int, int]] = {}
    for root in (lab.settings.home / "checkpoints" / of.run_id, lab.settings.home / "adapters" / of.policy):
        for path in sorted(root.rglob("*")):
            status = path.stat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns)
    return found


def test_fault_10_a_restart_with_fewer_ranks_makes_a_new_attempt_and_says_so(lab: Lab) -> None:
    """One of two ranks dies in the backward pass: the other ends too, with nothing trained."""
    lab.lay(3)
    of = lab.config(steps=1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world: dict[str, Any] = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with (
        trainer(lab, of, "rank0", RANK="0", **world) as (first, said),
        trainer(lab, of, "rank1", "SIGKILL at gradient 1", RANK="1", **world) as (second, also),
    ):
        for process, text in ((second, also), (first, said)):
            process.join(PATIENCE)
            assert process.exitcode not in (0, None), text.read_text()
        assert second.exitcode == -signal.SIGKILL
    assert lab.log(of).last_step == 0
    left = lab.log(of).latest_plan(1)
    assert left is not None and (left.world_size, {row.rank for row in left.rows}) == (2, {0, 1})
    code, text = ended(lab, of, "alone")
    assert code == 0, text
    assert "the plan of step 1 was made for another world or configuration: new attempt" in text
    run = lab.log(of)
    again, result = run.latest_plan(1), run.winner(1)
    assert again is not None and result is not None
    assert (again.attempt, again.world_size, result.attempt, result.plan_id) == (2, 1, 2, again.plan_id)
    assert [row.rollout_id for row in again.rows] == [row.rollout_id for row in left.rows]
    assert [manifest.world_size for manifest in run.manifests.values()] == [2, 1]
    assert run.plans[1, 1] == left
