"""The trainer on a real broker: a run, its replay, forgeries. Kills and zombies: test_trainer_faults.py."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from schemas import topics
from schemas.digest import with_digest
from schemas.ids import sha256_hex
from schemas.records import BackPressure, BatchPlan, Promotion, Rollout
from tentalis.kafka.admin import ensure
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.local.ports import free_port
from tentalis.ops.forget.core import redacted_rollout
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.support import forked
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.trainer_lab import config, rollout, rollouts, tiny_model
from trainer.advantages.baseline import STEP_ANSWERS, STEP_REWARDS, RunningBaseline
from trainer.config.trainer_config import TrainerConfig, config_text
from trainer.data.candidates import Offer, ReadSegment, offer_of
from trainer.data.fetch import BadRollouts
from trainer.data.plan import BatchPlanner, PlanContext, plan_of
from trainer.replay.compare import update_distance
from trainer.replay.replay import TOLERANCE, replay
from trainer.run.coordinator import HEARTBEAT_SECONDS
from trainer.run.run_log import RunLog, decode_record, read_run

pytestmark = pytest.mark.broker


class Lab:
    """A policy of its own on the shared broker, and a state directory."""

    def __init__(self, kafka: Kafka, unique: str, folder: Path, model: Path) -> None:
        self.settings = Settings(bootstrap=kafka.bootstrap, home=folder / "home", cache=folder / "cache")
        self.folder, self.model, self.policy = folder, model, unique
        eventually(lambda: ensure(self.settings) is not None, 30)
        self.codec = make_codec(self.settings)
        self.publisher = Publisher(self.settings, "test", self.codec)
        self.start = end_offsets(self.settings, topics.ROLLOUTS)

    def put(self, *records: Rollout) -> None:
        for record in records:
            self.publisher.send(topics.ROLLOUTS, record)
        self.publisher.flush()

    def put_groups(self, groups: int, **more: Any) -> list[Rollout]:
        groups_of_rollouts = rollouts(groups, policy=self.policy, prefix=f"{self.policy}-", **more)
        self.put(*groups_of_rollouts)
        return groups_of_rollouts

    def config(self, run_id: str = "run", **more: Any) -> TrainerConfig:
        values = {"run_id": f"{self.policy}-{run_id}", "policy": self.policy, "start": self.start}
        return config(self.model, **(values | more))

    def start_trainer(self, run_config: TrainerConfig, *options: str) -> ForkServerProcess:
        log = self.folder / f"{run_config.run_id}.log"
        argument = "\n".join((str(self.write_config(run_config)), *options))
        return forked.start(forked.train, argument, self.environment(), log, log)

    def train(self, run_config: TrainerConfig, *options: str) -> int | None:
        process = self.start_trainer(run_config, *options)
        try:
            process.join(180)
            return process.exitcode
        finally:
            forked.end(process)

    def train_as_ranks(self, run_config: TrainerConfig, ranks: int) -> list[int | None]:
        """Trains with ranks that are started one by one, as a launcher starts them; returns their exit codes."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        log, argument = self.folder / f"{run_config.run_id}.log", str(self.write_config(run_config))
        started = []
        try:
            for rank in range(ranks):
                environment = self.environment() | forked.rank_environment(store.port, rank, ranks)
                environment["GLOO_SOCKET_IFNAME"] = "lo"
                started.append(forked.start(forked.train, argument, environment, log, log))
            for process in started:
                process.join(180)
            return [process.exitcode for process in started]
        finally:
            for process in started:
                forked.end(process)

    @contextmanager
    def by_command(self, run_config: TrainerConfig, ranks: int) -> Iterator["subprocess.Popen[bytes]"]:
        """As a person does: `python -m trainer`, from nothing."""
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            "--config",
            str(self.write_config(run_config)),
            "--ranks",
            str(ranks),
        ]
        with (self.folder / f"{run_config.run_id}.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def train_by_command(self, run_config: TrainerConfig, ranks: int) -> int:
        with self.by_command(run_config, ranks) as process:
            return process.wait(180)

    def write_config(self, run_config: TrainerConfig) -> Path:
        path = self.folder / f"{run_config.run_id}.yaml"
        path.write_text(config_text(run_config))
        return path

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "TENTALIS_BOOTSTRAP": self.settings.require_bootstrap(),
            "TENTALIS_HOME": str(self.settings.home),
            "TENTALIS_CACHE": str(self.settings.cache),
        }

    def run_log(self, run_config: TrainerConfig) -> RunLog:
        return read_run(self.settings, self.codec, run_config.run_id)

    def hashes(self, run_config: TrainerConfig) -> list[str]:
        run = self.run_log(run_config)
        results = [run.winning_result(step) for step in range(run.last_step + 1)]
        return [result.adapter_sha256 for result in results if result is not None]

    def log_text(self, run_config: TrainerConfig) -> str:
        return (self.folder / f"{run_config.run_id}.log").read_text()

    def replay(self, run_config: TrainerConfig) -> tuple[int | None, dict[str, Any]]:
        out, err = self.folder / "replay.json", self.folder / "replay.log"
        out.unlink(missing_ok=True)
        process = forked.start(forked.replay, run_config.run_id, self.environment(), out, err)
        try:
            process.join(180)
            assert out.stat().st_size, err.read_text()
            return process.exitcode, json.loads(out.read_text())
        finally:
            forked.end(process)

    def replay_by_command(self, run_config: TrainerConfig) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "tentalis.cli", "replay", run_config.run_id, "-o", "json"],
            env=self.environment(),
            capture_output=True,
            timeout=180,
            check=False,
        )
        assert done.stdout, done.stderr.decode()
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, model: Path) -> Lab:
    return Lab(kafka, unique, tmp_path, model)


def test_a_run_publishes_and_replays_to_the_same_bytes(lab: Lab) -> None:
    """With what is off by default: the other tests have the defaults."""
    lab.put_groups(7)
    parts = {"kl": {"coef": 0.1, "against": "base"}, "pair": {"weight": 0.1, "threshold": 0.5}, "entropy_coef": 0.01}
    run_config = lab.config(loss={"kind": "dapo", "overlong": {"length": 12, "buffer": 8}} | parts)
    assert lab.train_by_command(run_config, ranks=1) == 0, lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert run.last_step == 3
    assert len(set(lab.hashes(run_config))) == 4
    manifest = run.first_manifest
    assert manifest is not None and manifest.first_version == 0
    for step in range(4):
        result, update = run.winning_result(step), run.updates[step]
        assert result is not None
        assert update.sha256 == result.adapter_sha256
        weights = Path(update.location.removeprefix("file://")) / "adapter_model.safetensors"
        assert sha256_hex(weights.read_bytes()) == update.sha256
    rows = [row.rollout_id for (step, _), plan in run.plans.items() for row in plan.rows]
    assert len(rows) == len(set(rows)) == 24
    for topic in (topics.RUNS, topics.BATCHES, topics.POLICIES, topics.ROLLOUTS):
        lab.publisher.send_bytes(topic, b"garbage", lab.policy.encode())
    lab.publisher.flush()
    code, report = lab.replay_by_command(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report
    named = {line.partition("[")[0] for line in report["unreadable"]}
    assert named == {topics.RUNS, topics.BATCHES, topics.POLICIES, topics.ROLLOUTS}, report["unreadable"]

    forge(lab, rows[5], keep_digest=False)
    forge(lab, rows[17], keep_digest=True)
    with pytest.raises(BadRollouts) as refused:
        replay(run_config.run_id, lab.settings)
    assert {(problem.kind, problem.rollout_id) for problem in refused.value.problems} == {
        ("forged", rows[5]),
        ("forged", rows[17]),
    }
    assert rows[5] in str(refused.value)
    assert [step.step for step in replay(run_config.run_id, lab.settings, to_step=0, verify_only=True)] == [0]


def test_conversations_are_compared_with_earlier_ones_over_a_restart_and_a_replay(lab: Lab) -> None:
    rewards = [float(index % 3 > 0) for index in range(24)]
    lab.put(*(rollout(f"{lab.policy}-{i}", policy=lab.policy, reward=reward) for i, reward in enumerate(rewards)))
    run_config = lab.config()
    assert lab.train(run_config, "steps=2") == 0, lab.log_text(run_config)
    assert lab.run_log(run_config).last_step == 2
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    run = lab.run_log(run_config)
    baseline = RunningBaseline()
    decay = run_config.loss.baseline_decay
    assert decay is not None
    for step in (1, 2, 3):
        plan, result = run.latest_plan(step), run.winning_result(step)
        assert plan is not None and result is not None
        assert plan.baseline == baseline.mean
        own = [rewards[int(row.rollout_id.split("/")[0].rpartition("-")[2])] for row in plan.rows]
        baseline = baseline.after({STEP_REWARDS: sum(own), STEP_ANSWERS: float(len(own))}, decay)
        assert RunningBaseline.of_metrics(result.metrics) == baseline
    assert baseline.mean is not None and 0.0 < baseline.mean < 1.0
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report


def test_two_policies_are_trained_beside_each_other_each_with_its_own_lineage(
    kafka: Kafka, unique: str, tmp_path: Path, model: Path
) -> None:
    """The manager's and a worker's rollouts lie mixed on the same partitions; the trainers share broker and state."""
    labs = [Lab(kafka, f"{unique}-{name}", tmp_path, model) for name in ("manager", "worker")]
    for part in range(3):
        for lab in labs:
            lab.put(*rollouts(2, policy=lab.policy, prefix=f"{lab.policy}-{part}-", seed=part))
    runs = [lab.config(steps=2, seed=seed) for seed, lab in enumerate(labs)]
    started = [lab.start_trainer(run_config) for lab, run_config in zip(labs, runs, strict=True)]
    for process, lab, run_config in zip(started, labs, runs, strict=True):
        process.join(180)
        forked.end(process)
        assert process.exitcode == 0, lab.log_text(run_config)
    for lab, run_config in zip(labs, runs, strict=True):
        run = lab.run_log(run_config)
        assert run.last_step == 2 and run.updates.keys() == {0, 1, 2}
        keys = {row.rollout_id for plan in run.plans.values() for row in plan.rows}
        assert len(keys) == 16 and all(key.startswith(f"{lab.policy}-") for key in keys)
        assert lab.replay(run_config)[1]["equal"] is True
    assert not set(labs[0].hashes(runs[0])) & set(labs[1].hashes(runs[1]))
    taken = runs[0].model_copy(update={"policy": labs[1].policy})
    assert labs[1].train(taken) != 0
    assert f"run {runs[0].run_id} trains {labs[0].policy}" in labs[1].log_text(taken)


def forge(lab: Lab, key: str, *, keep_digest: bool) -> None:
    """Another record under the key of a rollout, with another reward."""
    for stored in read_to_end(lab.settings, topics.ROLLOUTS):
        if stored.key == key:
            genuine = stored.decode(lab.codec)
            assert isinstance(genuine, Rollout)
            forged = genuine.model_copy(update={"reward": 0.123})
            lab.put(forged if keep_digest else with_digest(forged))
            return
    raise AssertionError(f"no rollout {key}")


def test_a_second_trainer_of_a_policy_takes_it_over_whatever_its_run(lab: Lab) -> None:
    first, second = lab.config("first", steps=None), lab.config("second", steps=1)
    lab.put_groups(2)
    process = lab.start_trainer(first)
    try:
        eventually(lambda: lab.run_log(first).last_step == 1, 120, 0.2, lambda: lab.log_text(first))
        # With a part of the partitions only it could not form a batch.
        assert lab.train(second) == 0, lab.log_text(second)
        process.join(60)
        assert process.exitcode == 1, lab.log_text(first)
        assert f"another trainer of the policy {lab.policy} has taken over" in lab.log_text(first)
    finally:
        forked.end(process)


@pytest.mark.long  # tests/unit/trainer/test_ranks.py holds a step over two ranks against the step over one
def test_two_ranks_train_the_same_plans_as_one(lab: Lab) -> None:
    lab.put_groups(7)
    one, two = lab.config("one"), lab.config("two")
    assert lab.train_by_command(two, ranks=2) == 0, lab.log_text(two)
    assert lab.train(one) == 0, lab.log_text(one)
    logs = lab.run_log(one), lab.run_log(two)
    for step in range(1, 4):
        alone, shared = (run.latest_plan(step) for run in logs)
        assert alone is not None and shared is not None
        assert [row.rollout_id for row in alone.rows] == [row.rollout_id for row in shared.rows]
        assert {row.rank for row in shared.rows} == {0, 1}
    last = [(checkpoint_of(lab, run_config) / "adapter_model.safetensors").read_bytes() for run_config in (one, two)]
    assert update_distance(last[0], last[1]).relative < TOLERANCE


def test_a_rank_that_dies_ends_its_world_and_the_next_one_goes_on_from_the_checkpoint(lab: Lab) -> None:
    made, run_config = rollouts(7, policy=lab.policy, prefix=f"{lab.policy}-"), lab.config()
    lab.put(*made[:12])
    with lab.by_command(run_config, ranks=2) as launcher:
        eventually(lambda: lab.run_log(run_config).last_step == 1, 400, 0.2, lambda: lab.log_text(run_config))
        rank_processes = psutil.Process(launcher.pid).children()
        next(rank for rank in rank_processes if rank.environ()["RANK"] == "1").kill()
        assert launcher.wait(60) == 1
    assert not psutil.wait_procs(rank_processes, 10)[1]
    lab.put(*made[12:])
    assert lab.train_as_ranks(run_config, 2) == [0, 0], lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert [(plan.attempt, plan.world_size) for plan in run.plans.values()] == [(1, 2)] * 3
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report


@contextmanager
def numbered_from_outside(
    lab: Lab, run_config: TrainerConfig, *commands: tuple[list[str], dict[str, str]]
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that run `python -m trainer` as ranks, as torchrun or a scheduler starts them."""
    train = ["-m", "trainer", "train", "--config", str(lab.write_config(run_config))]
    with ExitStack() as stack:
        started = []
        for begin, own in commands:
            log = stack.enter_context((lab.folder / f"{run_config.run_id}.log").open("ab"))
            process = subprocess.Popen([*begin, *train], env=lab.environment() | own, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            started.append(process)
        yield started


@pytest.mark.long  # test_rank_place.py has the ranks without a broker
@pytest.mark.timeout(1500)
def test_torchrun_starts_the_ranks_and_starts_them_again(lab: Lab) -> None:
    made, run_config = rollouts(7, policy=lab.policy, prefix=f"{lab.policy}-"), lab.config()
    lab.put(*made[:12])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    torchrun += ["--master-port", str(free_port())]
    with numbered_from_outside(lab, run_config, (torchrun, {})) as (agent,):
        eventually(lambda: lab.run_log(run_config).last_step == 1, 400, 0.2, lambda: lab.log_text(run_config))
        next(rank for rank in psutil.Process(agent.pid).children() if rank.environ().get("RANK") == "1").kill()
        lab.put(*made[12:])
        assert agent.wait(400) == 0, lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert [(plan.attempt, plan.world_size) for plan in run.plans.values()] == [(1, 2)] * 3


@pytest.mark.long  # test_rank_place.py has the ranks without a broker
@pytest.mark.timeout(1500)
def test_ranks_of_a_scheduler_meet_at_rank_0_and_end_if_one_comes_back_alone(lab: Lab) -> None:
    made, run_config = rollouts(7, policy=lab.policy, prefix=f"{lab.policy}-"), lab.config()
    lab.put(*made[:12])
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [([sys.executable], {"RANK": str(rank), **address}) for rank in range(2)]
    with numbered_from_outside(lab, run_config, *ranks) as (first, second):
        eventually(lambda: lab.run_log(run_config).last_step == 1, 400, 0.2, lambda: lab.log_text(run_config))
        second.kill()
        with numbered_from_outside(lab, run_config, ranks[1]) as (alone,):
            assert (alone.wait(120), first.wait(120)) == (1, 1), lab.log_text(run_config)
    assert "error: rank 1 was started again alone" in lab.log_text(run_config)
    lab.put(*made[12:])
    with numbered_from_outside(lab, run_config, *ranks) as (first, second):
        assert (first.wait(400), second.wait(120)) == (0, 0), lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert [(plan.attempt, plan.world_size) for plan in run.plans.values()] == [(1, 2)] * 3


@contextmanager
def two_nodes(lab: Lab, run_config: TrainerConfig, port: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Two launchers with a rank each and folders of their own, as on two machines."""
    command = [sys.executable, "-m", "tentalis.cli", "train", "--config", str(lab.write_config(run_config))]
    command += ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
    started = []
    with ExitStack() as stack:
        for node in range(2):
            log = stack.enter_context((lab.folder / f"{run_config.run_id}.log").open("ab"))
            own = {"TENTALIS_HOME": str(lab.folder / f"node-{node}"), "GLOO_SOCKET_IFNAME": "lo"}
            process = subprocess.Popen(
                [*command, "--node", str(node)], env=lab.environment() | own, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


@pytest.mark.long  # two launchers and two ranks load torch, twice
@pytest.mark.timeout(1500)
def test_two_nodes_without_a_common_folder_train_a_run_and_end_together(lab: Lab) -> None:
    made, run_config, port = rollouts(7, policy=lab.policy, prefix=f"{lab.policy}-"), lab.config(), free_port()
    lab.put(*made[:12])
    with two_nodes(lab, run_config, port) as (first, second):
        eventually(lambda: lab.run_log(run_config).last_step == 1, 400, 0.2, lambda: lab.log_text(run_config))
        (rank,) = psutil.Process(second.pid).children()
        rank.kill()
        assert second.wait(120) == 1 and first.wait(120) == 1
    assert "node 1 ended with exit code 1" in lab.log_text(run_config)
    lab.put(*made[12:])
    with two_nodes(lab, run_config, port) as launchers:
        assert [each.wait(400) for each in launchers] == [0, 0], lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert [(plan.attempt, plan.world_size) for plan in run.plans.values()] == [(1, 2)] * 3
    assert {row.rank for plan in run.plans.values() for row in plan.rows} == {0, 1}
    assert [(lab.folder / f"node-{node}" / "checkpoints").exists() for node in range(2)] == [True, False]
    lab.settings = lab.settings.model_copy(update={"home": lab.folder / "node-0"})
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report


@pytest.mark.long  # fault_10 of test_trainer_faults.py holds the same against the log without the second launcher
def test_a_restart_with_fewer_ranks_makes_a_new_attempt_and_replays(lab: Lab) -> None:
    """Somebody leaves before the restart: the new attempt is without what was theirs."""
    by_id = {rollout.rollout_id: rollout for rollout in lab.put_groups(7)}
    run_config = lab.config(steps=1)
    assert lab.train_by_command(run_config, ranks=2) == 0, lab.log_text(run_config)
    left_plan = plan_left_by_a_dead_world_of_two(lab, run_config)
    lab.publisher.send(topics.BATCHES, left_plan)
    lab.put(redacted_rollout(by_id[left_plan.rows[3].rollout_id]))
    assert lab.train(lab.config(steps=3)) == 0, lab.log_text(run_config)
    run = lab.run_log(run_config)
    plans = {step: run.latest_plan(step) for step in (1, 2, 3)}
    assert [(plan.attempt, plan.world_size) for plan in plans.values() if plan] == [(1, 2), (2, 1), (1, 1)]
    kept_ids = [row.rollout_id for row in left_plan.rows if row is not left_plan.rows[3]]
    assert [row.rollout_id for row in run.plans[2, 2].rows] == kept_ids
    assert [(drop.first_offset, drop.reason) for drop in run.plans[2, 2].drops] == [
        (left_plan.rows[3].offset, "forgotten")
    ]
    assert [result.attempt for step in (1, 2, 3) if (result := run.winning_result(step))] == [1, 2, 1]
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report


def plan_left_by_a_dead_world_of_two(lab: Lab, run_config: TrainerConfig) -> BatchPlan:
    run = lab.run_log(run_config)
    first = run.latest_plan(1)
    assert first is not None
    planner = BatchPlanner(8, 1000, {row.rollout_id: row.digest for row in first.rows}, {p: 0 for p in range(8)})
    ends = end_offsets(lab.settings, topics.ROLLOUTS)
    offers: dict[int, list[Offer]] = {partition: [] for partition in ends}
    for stored in read_to_end(lab.settings, topics.ROLLOUTS, start={p.partition: p.offset for p in first.low_water}):
        if stored.key is not None and stored.key.startswith(lab.policy):
            record = stored.decode(lab.codec)
            assert isinstance(record, Rollout)
            offers[stored.partition].append(offer_of(record, stored.partition, stored.offset, stored.timestamp, 128))
    for partition, partition_offers in offers.items():
        planner.add_segment(ReadSegment(partition, 0, ends[partition], tuple(partition_offers)))
    draft = planner.next_draft(1, ends)
    assert draft is not None
    context = PlanContext(
        run_config.run_id,
        run_config.policy,
        first.manifest_digest,
        2,
        run_config.micro_batch_tokens,
        run_config.seed,
        "dead",
    )
    return plan_of(draft, context, 2, 1, now_ms())


def checkpoint_of(lab: Lab, run_config: TrainerConfig) -> Path:
    (newest,) = (lab.settings.home / "checkpoints" / run_config.run_id).glob(f"{run_config.steps:06d}-*")
    return newest


def test_bad_records_are_dead_lettered_and_the_trainer_waits_for_the_served_version(lab: Lab) -> None:
    garbage = b"\xc3\x01garbage"
    liar = rollout(f"{lab.policy}-liar", policy=lab.policy).model_copy(update={"reward": -1.0})
    foreign = rollout(f"{lab.policy}-foreign", policy="somebody-else").model_copy(update={"reward": -1.0})
    greedy = rollout(f"{lab.policy}-greedy", policy=lab.policy, temperature=0.0)
    lab.publisher.send_bytes(topics.ROLLOUTS, lab.policy.encode(), garbage, [("mine", b"1")])
    lab.put(liar, foreign, greedy)
    run_config = lab.config(max_staleness=1, steps=None)
    process = lab.start_trainer(run_config)
    try:
        eventually(lambda: lab.run_log(run_config).updates, 120, 0.2, lambda: lab.log_text(run_config))
        lab.put_groups(7)
        eventually(lambda: lab.run_log(run_config).last_step == 1, 60, 0.2, lambda: lab.log_text(run_config))
        # Step 2 would be two ahead of the served version 0.
        eventually(
            lambda: "waiting: step 1 is trained" in lab.log_text(run_config), 60, 0.2, lambda: lab.log_text(run_config)
        )
        assert lab.run_log(run_config).last_step == 1
        # Two full batches wait besides: what were sampled now would be dropped.
        eventually(
            lambda: backpressure_signals(lab)[-1][2],
            60,
            0.2,
            lambda: f"{backpressure_signals(lab)}\n{lab.log_text(run_config)}",
        )
        promote(lab, 1)
        eventually(lambda: lab.run_log(run_config).last_step == 2, 60, 0.2, lambda: lab.log_text(run_config))
        # What is left is too old by now, and nothing waits any more.
        eventually(
            lambda: backpressure_signals(lab)[-1] == (1, 0, False),
            60,
            0.2,
            lambda: f"{backpressure_signals(lab)}\n{lab.log_text(run_config)}",
        )
        process.terminate()
        process.join(5)
        assert process.exitcode == ExitCode.STOPPED, lab.log_text(run_config)
    finally:
        forked.end(process)
    dead = [
        stored
        for stored in read_to_end(lab.settings, topics.dlq(topics.ROLLOUTS))
        if dict(stored.headers).get("tentalis.dlq.consumer-group") == f"tentalis-trainer-{lab.policy}".encode()
    ]
    by_key = {stored.key: stored for stored in dead}
    assert by_key[lab.policy].value == garbage
    assert dict(by_key[lab.policy].headers)["mine"] == b"1"
    assert dict(by_key[lab.policy].headers)["tentalis.dlq.error-stage"] == b"decode"
    assert dict(by_key[liar.key].headers)["tentalis.dlq.error-stage"] == b"validate"
    assert set(by_key) >= {lab.policy, liar.key}
    assert foreign.key not in by_key, "forged too, but that is for its own policy's trainer to say"
    drops = [drop for plan in lab.run_log(run_config).plans.values() for drop in plan.drops]
    assert [(drop.count, drop.reason) for drop in drops] == [(1, "greedy sampling")]
    assert greedy.rollout_id not in {
        row.rollout_id for plan in lab.run_log(run_config).plans.values() for row in plan.rows
    }


def test_an_empty_topic_is_waited_at_quietly_with_a_heartbeat_in_the_metrics(lab: Lab) -> None:
    run_config, port, began = lab.config(steps=1), free_port(), time.monotonic()
    process = lab.start_trainer(run_config, f"port={port}")

    def read(metric: str) -> float:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
        except OSError:
            return 0.0
        return next((float(value) for name, _, value in lines if name == metric), 0.0)

    waits, turn = 'tentalis_trainer_waiting{reason="rollouts"}', "tentalis_trainer_turn_timestamp_seconds"
    try:
        eventually(lambda: read(waits) == 1.0, 120, 0.2, lambda: lab.log_text(run_config))
        for _ in range(3):
            before = read(turn)
            eventually(lambda before=before: read(turn) > before > 0.0, 60, 0.2, lambda: lab.log_text(run_config))
        count = lab.log_text(run_config).count("waiting for rollouts: 0 of 8 are available")
        assert 1 <= count <= 2 + (time.monotonic() - began) / HEARTBEAT_SECONDS, lab.log_text(run_config)
        lab.put_groups(2)
        process.join(120)
        assert process.exitcode == 0 and lab.run_log(run_config).last_step == 1, lab.log_text(run_config)
    finally:
        forked.end(process)


def test_a_topic_full_of_garbage_stops_the_trainer_instead_of_emptying_it(lab: Lab) -> None:
    lab.put_groups(2)
    for number in range(102):
        lab.publisher.send_bytes(topics.ROLLOUTS, b"garbage", b"bad %d" % number)
    lab.publisher.flush()
    run_config = lab.config()
    assert lab.train(run_config) == ExitCode.NEEDS_OPERATOR, lab.log_text(run_config)
    assert "records in a row could not be processed (limit 100)" in lab.log_text(run_config)
    ours = f"tentalis-trainer-{lab.policy}".encode()
    dead_letters = read_to_end(lab.settings, topics.dlq(topics.ROLLOUTS))
    assert sum(dict(letter.headers).get("tentalis.dlq.consumer-group") == ours for letter in dead_letters) <= 100


def test_a_rollback_goes_on_as_a_new_run_and_trains_nothing_twice(lab: Lab) -> None:
    made = rollouts(11, policy=lab.policy, prefix=f"{lab.policy}-")
    lab.put(*made[:24])
    run_config = lab.config(steps=None, keep_checkpoints=1, windows=["00:00-00:01", "12:00-12:01"])
    branch = run_config.model_copy(update={"run_id": f"{run_config.run_id}.1"})
    assert lab.train(run_config, "steps=3") == 0, lab.log_text(run_config)
    before = lab.run_log(run_config)
    assert before.last_step == 3, "by hand, whatever the hours are"
    process = lab.start_trainer(run_config, "steps=2")
    try:
        eventually(
            lambda: "continues after step 3" in lab.log_text(run_config), 120, 0.1, lambda: lab.log_text(run_config)
        )
        promote(lab, 1, "rollback")
        eventually(lambda: lab.run_log(branch).manifests, 60, 0.2, lambda: lab.log_text(run_config))
        lab.put(*made[24:])
        process.join(120)
        assert process.exitcode == 0, lab.log_text(run_config)
    finally:
        forked.end(process)
    run = lab.run_log(branch)
    assert run.first_manifest is not None and (run.first_manifest.parent_run, run.first_manifest.parent_step) == (
        run_config.run_id,
        1,
    )
    assert run.first_manifest.first_version == 4, "no name is used twice"
    assert lab.hashes(branch)[0] == lab.hashes(run_config)[1] == run.updates[4].sha256
    assert run.last_step == 2 and lab.run_log(run_config).last_step == 3
    trained = [row.rollout_id for each in (before, run) for plan in each.plans.values() for row in plan.rows]
    assert len(trained) == len(set(trained)) == 40
    # What is there is found again, and a decision is acted on once.
    assert lab.train(run_config, "steps=1", "caught_up") == 0, lab.log_text(run_config)
    assert lab.run_log(branch) == run
    code, report = lab.replay(branch)
    assert (code, report["equal"]) == (0, True), report


def test_a_rollback_to_a_version_of_another_run_and_a_run_that_was_overtaken_go_on_as_branches(lab: Lab) -> None:
    made = rollouts(10, policy=lab.policy, prefix=f"{lab.policy}-")
    lab.put(*made[:24])
    first, second = lab.config("first", steps=None), lab.config("second", steps=None)
    for run_config in (first, second):
        assert lab.train(run_config, "steps=2") == 0, lab.log_text(run_config)
    promote(lab, 1, "rollback")
    assert lab.train(second, "steps=1") == 0, lab.log_text(second)
    branch = second.model_copy(update={"run_id": f"{second.run_id}.1"})
    run = lab.run_log(branch)
    assert run.first_manifest is not None and (run.first_manifest.parent_run, run.first_manifest.parent_step) == (
        first.run_id,
        1,
    )
    assert (run.first_manifest.first_version, run.last_step) == (6, 1)
    assert lab.hashes(branch)[0] == lab.hashes(first)[1]
    code, report = lab.replay(branch)
    assert (code, report["equal"]) == (0, True), report
    # v3, which would be the number of its next step, is the second run's.
    lab.put(*made[24:])
    assert lab.train(first, "steps=1") == 0, lab.log_text(first)
    again = first.model_copy(update={"run_id": f"{first.run_id}.1"})
    run = lab.run_log(again)
    assert run.first_manifest is not None and (run.first_manifest.parent_run, run.first_manifest.parent_step) == (
        first.run_id,
        2,
    )
    assert (run.first_manifest.first_version, run.last_step) == (8, 1)
    trained = [
        {row.rollout_id for plan in lab.run_log(run_config).plans.values() for row in plan.rows}
        for run_config in (second, branch)
    ]
    trained.append({row.rollout_id for row in run.plans[1, 1].rows})
    assert [len(rows) for rows in trained] == [16, 8, 8] and len(set.union(*trained)) == 32, "none is trained twice"
    # What has another shape cannot be gone on from, and leaves no run that could not begin.
    promote(lab, 7, "rollback")
    other = lab.config("first", steps=None, lora={"rank": 2, "alpha": 4})
    assert lab.train(other, "steps=1") != 0
    message = f"cannot start from step 1 of run {branch.run_id}, which has r 4, not 2 and has lora_alpha 8.0, not 4.0"
    assert message in lab.log_text(other)
    assert not lab.run_log(first.model_copy(update={"run_id": f"{first.run_id}.2"})).manifests


def backpressure_signals(lab: Lab) -> list[tuple[int, int, bool]]:
    """Returns the policy's announcements of backpressure: steps ahead, full batches that wait, closed."""
    records = (decode_record(stored, lab.codec) for stored in read_to_end(lab.settings, topics.POLICIES))
    ours = (each for each in records if isinstance(each, BackPressure) and each.policy == lab.policy)
    return [(each.ahead, each.waiting, each.closed) for each in ours]


def promote(lab: Lab, version: int, mode: str = "always") -> None:
    lab.publisher.send(
        topics.POLICIES,
        Promotion(policy=lab.policy, version=version, event_time=now_ms(), sha256="-", mode=mode),
    )
    lab.publisher.flush()
