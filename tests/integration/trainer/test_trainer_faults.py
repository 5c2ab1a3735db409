"""Faults of a resumed run, on a real broker: killed at every commit step, frozen, moved, made smaller.

The table of faults, and where each is shown, is in docs/concepts/trainer.md.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from schemas import topics
from schemas.ids import sha256_hex
from schemas.records import PolicyUpdate
from tentalis.kafka.consumer import read_to_end
from tests.integration.trainer.test_trainer_run import Lab
from tests.support import forked
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.trainer_lab import tiny_model
from trainer.config.trainer_config import TrainerConfig
from trainer.run.run_log import RunLog

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
# The same while the next step is planned and computed: a thread stands at the first point until the other one is at the
# second. A step whose checkpoint is saved is finished at the next start, before anything is computed beside it.
OVERLAPS = (
    "save 1 until committed BatchPlan 2",
    "saved 1 until gradient 2",
    "save 2 until committed BatchPlan 3",
    "commit StepResult 2 until stepped 3",
    "committed StepResult 3 until commit BatchPlan 4",
    "publish {version_4} until gradient 5",
    "save 5 until committed BatchPlan 6",
    "commit PolicyUpdate 5 until stepped 6",
    "gradient 7 until committed StepResult 6",
    "stepped 8 until committed PolicyUpdate 7",
)
OVERLAPPED_STEPS = 8
STEPS = 4
PATIENCE = 180  # seconds, on a machine that does other things too


@contextmanager
def trainer(
    lab: Lab, run_config: TrainerConfig, name: str, *options: str, **environment: str
) -> Iterator[tuple[ForkServerProcess, Path]]:
    """A trainer of its own, and what it says."""
    log_file = lab.folder / f"{run_config.run_id}-{name}.log"
    argument = "\n".join((str(lab.write_config(run_config)), *options))
    process = forked.start(forked.train, argument, lab.environment() | environment, log_file, log_file)
    try:
        yield process, log_file
    finally:
        forked.end(process)


def ended(lab: Lab, run_config: TrainerConfig, name: str, *options: str) -> tuple[int | None, str]:
    """The exit code and the output of a trainer."""
    with trainer(lab, run_config, name, *options) as (process, log_file):
        process.join(PATIENCE)
        return process.exitcode, log_file.read_text()


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
    run_config: TrainerConfig
    calm_config: TrainerConfig
    run: RunLog
    calm: RunLog


@pytest.fixture(scope="module")
def killed(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    lab = Lab(kafka, f"killed-{os.urandom(4).hex()}", folder, model)
    lab.put_groups(2 * OVERLAPPED_STEPS + 1)
    run_config, calm = lab.config("killed", steps=STEPS), lab.config("calm", steps=STEPS)
    for number, cut in enumerate(CUTS):
        code, log_file = ended(lab, run_config, f"{number:02d}", f"SIGKILL at {cut}")
        assert code == -signal.SIGKILL, f"not killed at {cut}: {code}\n{log_file}"
    for config in (run_config, calm):
        code, log_file = ended(lab, config, "last")
        assert code == 0, log_file
    return Killed(lab, run_config, calm, lab.run_log(run_config), lab.run_log(calm))


def rows_of(run: RunLog) -> list[list[tuple[str, str, int]]]:
    plans = (run.latest_plan(step) for step in range(1, STEPS + 1))
    return [[(row.rollout_id, row.digest, row.micro_batch) for row in plan.rows] for plan in plans if plan is not None]


def test_fault_01_a_run_killed_at_every_commit_step_trains_each_batch_once_to_the_same_bytes(killed: Killed) -> None:
    assert killed.lab.hashes(killed.run_config) == killed.lab.hashes(killed.calm_config)
    assert len(set(killed.lab.hashes(killed.run_config))) == STEPS + 1
    assert rows_of(killed.run) == rows_of(killed.calm)
    trained = [key for rows in rows_of(killed.run) for key, _, _ in rows]
    assert len(trained) == len(set(trained)) == 8 * STEPS
    assert {attempt for _, attempt in killed.run.plans} == {1}, "a plan that is on the log is executed as it stands"
    code, report = killed.lab.replay(killed.run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, STEPS + 1), report


def test_fault_01_a_run_killed_while_it_commits_one_step_and_computes_the_next_has_the_same_bytes(
    killed: Killed,
) -> None:
    lab = killed.lab
    run_config = lab.config("overlapped", steps=OVERLAPPED_STEPS)
    version_4 = lab.run_log(killed.calm_config).highest_version + 1 + 4
    for number, cut in enumerate(each.format(version_4=version_4) for each in OVERLAPS):
        code, log_file = ended(lab, run_config, f"{number:02d}", f"SIGKILL at {cut}")
        assert code == -signal.SIGKILL, f"not killed at {cut}: {code}\n{log_file}"
    code, log_file = ended(lab, run_config, "last")
    assert code == 0, log_file
    run = lab.run_log(run_config)
    assert lab.hashes(run_config)[: STEPS + 1] == lab.hashes(killed.calm_config)
    assert rows_of(run) == rows_of(killed.calm)
    trained = [row.rollout_id for plan in run.plans.values() for row in plan.rows]
    assert len(trained) == len(set(trained)) == 8 * OVERLAPPED_STEPS
    assert {attempt for _, attempt in run.plans} == {1}, "a plan that is on the log is executed as it stands"
    written = records_of(lab, run_config)
    assert len(written) == len(set(written)), "each plan, result and version is written once"
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, OVERLAPPED_STEPS + 1), report


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
        if isinstance(record, PolicyUpdate) and record.run_id == killed.run_config.run_id:
            on_the_log.setdefault(record.version, []).append(record.sha256)
    assert on_the_log == {step: [sha256] for step, sha256 in enumerate(lab.hashes(killed.run_config))}
    for version, update in sorted(run.updates.items()):
        weights = Path(update.location.removeprefix("file://")) / "adapter_model.safetensors"
        assert sha256_hex(weights.read_bytes()) == update.sha256, f"v{version}"


def newest_checkpoint(lab: Lab, run_config: TrainerConfig) -> Path:
    return max((lab.settings.home / "checkpoints" / run_config.run_id).glob("0*"))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_fault_06_fault_07_lost_checkpoints_are_trained_again_from_the_log(killed: Killed) -> None:
    """Servers have these versions already: each comes back with the recorded bytes, and nothing is written twice."""
    lab = killed.lab
    run_config = lab.config("damaged", steps=STEPS)
    assert ended(lab, run_config, "first", "steps=2")[0] == 0
    flip_a_byte(newest_checkpoint(lab, run_config) / "optimizer.safetensors")
    code, text = ended(lab, run_config, "flipped")
    assert code == 0, text
    assert "optimizer.safetensors has another sha256 than in state.json" in text
    assert "continues from step 1, and trains step 2 again from the log" in text
    assert lab.hashes(run_config) == lab.hashes(killed.calm_config)

    before, published = records_of(lab, run_config), files_of(lab, run_config, "adapters")
    shutil.rmtree(newest_checkpoint(lab, run_config))
    code, text = ended(lab, run_config, "missing")
    assert code == 0 and "is no checkpoint of step 4 that belongs to the log" in text, text
    assert "trains step 4 again" in text
    # Each is lost in its own way.
    root = lab.settings.home / "checkpoints" / run_config.run_id
    fourth, third, second, first, initial = sorted(root.glob("0*"), reverse=True)
    weights = fourth / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (third / "optimizer.safetensors").unlink()
    flip_a_byte(second / "state.json")
    (first / "state.json").write_text("")
    shutil.rmtree(initial)
    changed = run_config.model_copy(update={"seed": run_config.seed + 1})
    code, text = ended(lab, changed, "changed")
    assert code not in (0, None) and "Restore these settings or a checkpoint" in text, text
    assert len(list(root.glob("0*"))) == STEPS, "a start that is refused leaves what it found"
    code, text = ended(lab, run_config, "all")
    assert code == 0 and f"continues from step 0, and trains steps 1 to {STEPS} again from the log" in text, text
    assert records_of(lab, run_config) == before
    assert files_of(lab, run_config, "adapters") == published
    assert [path.name[:6] for path in sorted(root.glob("0*"))] == [f"{step:06d}" for step in range(STEPS + 1)]
    assert len(list((root / "damaged").iterdir())) == 5


def records_of(lab: Lab, run_config: TrainerConfig) -> list[tuple[str, str | None]]:
    """The records of the run, repeats too."""
    run_id = run_config.run_id.encode()
    return [
        (stored.topic, stored.key)
        for topic in (topics.RUNS, topics.BATCHES, topics.POLICIES)
        for stored in read_to_end(lab.settings, topic)
        if stored.value is not None and run_id in stored.value and not str(stored.key).endswith("/back-pressure")
    ]


def test_fault_05_fault_07_zombies_write_nothing_and_a_restart_goes_no_further_ahead(lab: Lab) -> None:
    """Rank 0 is frozen with its plan, its checkpoint, its policy ready to be written; each time another takes over."""
    lab.put_groups(9)
    run_config = lab.config(steps=None, max_staleness=2)
    waits = "waiting: step 2 is trained, 2 steps ahead of the served version: none is served"
    with (
        trainer(lab, run_config, "a", "SIGSTOP at commit BatchPlan 1") as a,
        trainer_after(lab, run_config, a, "b", "SIGSTOP at stepped 1") as b,
        trainer_after(lab, run_config, b, "c", "SIGSTOP at save 1") as c,
        trainer_after(lab, run_config, c, "d", "SIGSTOP at commit PolicyUpdate 1") as d,
        trainer_after(lab, run_config, d, "e") as e,
    ):
        eventually(lambda: waits in e[1].read_text(), PATIENCE, message=e[1].read_text)
        before, on_disk = lab.run_log(run_config), files_of(lab, run_config)
        assert (before.last_step, sorted(before.plans)) == (2, [(1, 1), (2, 1)])
        for process, log_file in (a, b, c, d):
            os.kill(process.pid or 0, signal.SIGCONT)
            process.join(PATIENCE)
            assert process.exitcode not in (0, None), log_file.read_text()
            assert "another trainer of the policy" in log_file.read_text()
        assert lab.run_log(run_config) == before
        assert files_of(lab, run_config) == on_disk
        assert e[0].is_alive(), e[1].read_text()
    with trainer(lab, run_config, "f") as (_, log_file):
        eventually(lambda: waits in log_file.read_text(), PATIENCE, message=log_file.read_text)
    assert lab.run_log(run_config) == before


def half_written(lab: Lab) -> set[Path]:
    """The temporary folders of checkpoints and adapters."""
    return {path for folder in ("checkpoints", "adapters") for path in (lab.settings.home / folder).glob("*/.*")}


def test_a_full_disk_ends_the_trainer_and_the_next_one_continues_to_the_same_bytes(killed: Killed) -> None:
    """The error of a commit ends the trainer, though it has trained the next step meanwhile."""
    lab = killed.lab
    run_config = lab.config("full", steps=STEPS)
    first_version = lab.run_log(killed.calm_config).highest_version + 1
    points = "save 2 until committed BatchPlan 3", f"publish {first_version + 3} until committed BatchPlan 4"
    for name, point in zip(("checkpoint", "adapter"), points, strict=True):
        before = half_written(lab)
        code, text = ended(lab, run_config, name, f"ENOSPC at {point}")
        assert code not in (0, None) and "No space left on device" in text, text
        assert half_written(lab) <= before, "nothing half written stays, as it does after a kill"
        run = lab.run_log(run_config)
        assert (run.last_step, max(step for step, _ in run.plans)) == ((1, 3) if name == "checkpoint" else (3, 4))
    code, text = ended(lab, run_config, "last")
    assert code == 0, text
    assert lab.hashes(run_config) == lab.hashes(killed.calm_config)


@contextmanager
def trainer_after(
    lab: Lab, run_config: TrainerConfig, frozen: tuple[ForkServerProcess, Path], name: str, *options: str
) -> Iterator[tuple[ForkServerProcess, Path]]:
    """A trainer that is started once another one stands still."""
    status = Path(f"/proc/{frozen[0].pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", PATIENCE, message=frozen[1].read_text)
    with trainer(lab, run_config, name, *options) as started:
        yield started


def files_of(lab: Lab, run_config: TrainerConfig, *folders: str) -> dict[str, tuple[int, int]]:
    """Every checkpoint and adapter of the policy: which files they are, and when they were written."""
    found: dict[str, tuple[int, int]] = {}
    names = {"checkpoints": run_config.run_id, "adapters": run_config.policy}
    for root in (lab.settings.home / folder / names[folder] for folder in folders or names):
        for path in sorted(root.rglob("*")):
            status = path.stat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns)
    return found


def test_fault_10_a_restart_with_fewer_ranks_makes_a_new_attempt_and_says_so(lab: Lab) -> None:
    """One of two ranks dies in the backward pass: the other ends too, with nothing trained."""
    lab.put_groups(3)
    run_config = lab.config(steps=1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forked.rank_environment(store.port, rank, 2) for rank in range(2)]
    with (
        trainer(lab, run_config, "rank0", **ranks[0]) as (first, log_file),
        trainer(lab, run_config, "rank1", "SIGKILL at gradient 1", **ranks[1]) as (second, second_log),
    ):
        for process in (first, second):
            process.join(PATIENCE)
        said = f"rank 0:\n{log_file.read_text()}\nrank 1:\n{second_log.read_text()}"
        assert (first.exitcode, second.exitcode) == (1, -signal.SIGKILL), said
    assert "rank 1 has broken the connection and given no sign of life for 10 s" in log_file.read_text(), said
    assert lab.run_log(run_config).last_step == 0
    left_plan = lab.run_log(run_config).latest_plan(1)
    assert left_plan is not None and (left_plan.world_size, {row.rank for row in left_plan.rows}) == (2, {0, 1})
    code, text = ended(lab, run_config, "alone")
    assert code == 0, text
    assert "the plan of step 1 was made for another world or configuration: new attempt" in text
    run = lab.run_log(run_config)
    new_plan, result = run.latest_plan(1), run.winning_result(1)
    assert new_plan is not None and result is not None
    assert (new_plan.attempt, new_plan.world_size, result.attempt, result.plan_id) == (2, 1, 2, new_plan.plan_id)
    assert [row.rollout_id for row in new_plan.rows] == [row.rollout_id for row in left_plan.rows]
    assert [manifest.world_size for manifest in run.manifests.values()] == [2, 1]
    assert run.plans[1, 1] == left_plan
