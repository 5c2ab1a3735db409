"""Faults when a run is resumed, as far as they show without a broker. The table is in docs/concepts/trainer.md."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from schemas.records import BatchPlan
from tests.support.trainer_lab import config, rollouts, tiny_model
from tests.unit.trainer.test_plan import CONTEXT, drain, offer, segment
from tests.unit.trainer.test_step import engine_of, run_step, state_of
from trainer.config.trainer_config import TrainerConfig
from trainer.data.candidates import Offer
from trainer.data.plan import BatchPlanner, plan_of
from trainer.run.checkpoint import Checkpoint, OptimizerState, save_checkpoint
from trainer.step.engine import TrainingEngine

BATCHES = [rollouts(2, 4, seed=step, prefix=f"s{step}-") for step in range(3)]


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return config(tiny_model(tmp_path_factory.mktemp("model")))


def checkpointed(engine: TrainingEngine, folder: Path) -> Checkpoint:
    policy = engine.policy
    written = save_checkpoint(
        folder, state_of(engine), policy.weights_bytes(), policy.files(), engine.optimizer_state()
    )
    return Checkpoint.read(written.folder)


def resumed(
    run_config: TrainerConfig, checkpoint: Checkpoint, optimizer: OptimizerState | None = None
) -> TrainingEngine:
    engine = engine_of(run_config)
    engine.restore(checkpoint.weights(), checkpoint.optimizer() if optimizer is None else optimizer)
    return engine


def test_fault_02_the_moments_of_every_trained_parameter_come_back(run_config: TrainerConfig, tmp_path: Path) -> None:
    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0], 1)
    checkpoint = checkpointed(engine, tmp_path)
    before = engine.optimizer_state()
    names = [name for name, _ in engine.policy.trained_parameters()]
    assert set(before.moments) == {f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")}
    same = resumed(run_config, checkpoint)
    after = same.optimizer_state()
    assert after.steps == before.steps == 1
    assert all(torch.equal(after.moments[name], moment) for name, moment in before.moments.items())
    zeroed = resumed(
        run_config, checkpoint, OptimizerState({n: torch.zeros_like(m) for n, m in before.moments.items()}, 1)
    )
    bare = resumed(run_config, checkpoint, OptimizerState({}, 0))
    for each in (engine, same, zeroed, bare):
        run_step(each, run_config, BATCHES[1], 2)
    assert same.policy.weights_bytes() == engine.policy.weights_bytes()
    for lost in (zeroed, bare):
        assert lost.policy.weights_bytes() != engine.policy.weights_bytes(), "the bytes show it where they do not"


@st.composite
def logs(draw: st.DrawFn) -> list[list[Offer]]:
    """Partitions whose brokers' clocks step back, with what cannot be trained and what comes twice among the rest."""
    made: list[list[Offer]] = []
    for partition in range(draw(st.integers(1, 3))):
        offsets = draw(st.lists(st.integers(1, 3), max_size=10))
        log: list[Offer] = []
        for number, step in enumerate(offsets):
            at = sum(offsets[:number]) + step
            unfit = draw(st.sampled_from([None, None, None, "greedy sampling"]))
            key = draw(st.sampled_from(["", "", f"twice{partition}/0"]))
            log.append(offer(partition, at, draw(st.integers(0, 20)), key, unfit=unfit))
        made.append(log)
    return made


def planner_for(made: Sequence[Sequence[Offer]], plans: Sequence[BatchPlan] = ()) -> BatchPlanner:
    """A planner as a start makes it: what the plans have used up, and the low water of the last one."""
    consumed = {row.rollout_id: row.digest for plan in plans for row in plan.rows}
    low_water = {position.partition: position.offset for position in plans[-1].low_water} if plans else {}
    return BatchPlanner(2, 100, consumed, dict.fromkeys(range(len(made)), 0) | low_water)


@settings(max_examples=200, deadline=None)
@given(logs(), st.data())
def test_fault_03_a_restart_goes_on_in_the_order_in_which_the_run_would_have(
    made: list[list[Offer]], data: st.DataObject
) -> None:
    ends = {partition: log[-1].offset + 1 if log else 0 for partition, log in enumerate(made)}

    def read(planner: BatchPlanner) -> BatchPlanner:
        for partition, log in enumerate(made):
            first = planner.low_water[partition]
            planner.add_segment(
                segment(partition, first, [each for each in log if each.offset >= first], ends[partition])
            )
        return planner

    expected = drain(read(planner_for(made)), ends)
    n_done = data.draw(st.integers(0, len(expected)))
    restarted = planner_for(made, expected[:n_done])
    if n_done < len(expected) and data.draw(st.booleans()):
        # The plan of the next step is on the log: it is executed before anything is read.
        plan_on_log = expected[n_done]
        positions = {position.partition: position.offset for position in plan_on_log.low_water}
        low_water = dict(restarted.low_water)
        restarted.consume(plan_on_log.rows, positions)
        n_done += 1
        for partition, log in enumerate(made):
            first = low_water[partition]
            restarted.add_segment(
                segment(partition, first, [each for each in log if each.offset >= first], ends[partition])
            )
    else:
        read(restarted)
    remaining = []
    while (draft := restarted.next_draft(0, ends)) is not None:
        remaining.append(plan_of(draft, CONTEXT, n_done + len(remaining) + 1, 1, 0))
        restarted.consume(remaining[-1].rows, draft.low_water)
    assert [plan.plan_id for plan in remaining] == [plan.plan_id for plan in expected[n_done:]]


def test_fault_08_a_step_draws_from_its_plans_seed_and_from_nothing_that_came_before(run_config: TrainerConfig) -> None:
    """There is no random state in a checkpoint. The policies here are made to draw numbers, as dropout would."""

    def trained(disturb: int, seeded_otherwise: int = 0) -> bytes:
        engine = engine_of(run_config)
        noisy = engine.policy.lm.get_input_embeddings()
        noisy.register_forward_hook(lambda _, __, out: out + 0.1 * torch.randn_like(out))
        random.seed(disturb)
        np.random.seed(disturb)
        torch.manual_seed(disturb)
        torch.rand(disturb)
        run_step(engine, run_config, BATCHES[0], 1 + seeded_otherwise)
        return engine.policy.weights_bytes()

    assert trained(1) == trained(2)
    assert trained(1) != trained(1, seeded_otherwise=1), "else nothing was drawn"


def test_fault_09_a_saved_adapter_gives_the_same_log_probs_also_on_a_bfloat16_base(
    run_config: TrainerConfig, tmp_path: Path
) -> None:
    half = run_config.model_copy(update={"base_dtype": "bfloat16"})
    engine = engine_of(half)
    run_step(engine, half, BATCHES[0], 1)
    checkpoint = checkpointed(engine, tmp_path)
    assert {tensor.dtype for tensor in load(checkpoint.weights()).values()} == {torch.float32}
    assert {moment.dtype for moment in checkpoint.optimizer().moments.values()} == {torch.float32}
    again = resumed(half, checkpoint)
    tokens = torch.arange(1, 40)
    assert torch.equal(again.policy.token_logprobs(tokens), engine.policy.token_logprobs(tokens))
    first, second = (run_step(each, half, BATCHES[1], 2).metrics for each in (engine, again))
    assert first == second and first["rl_loss"] != 0.0
    assert again.policy.weights_bytes() == engine.policy.weights_bytes()


def test_fault_07_a_checkpoint_that_is_there_is_not_taken_away_to_be_written_again(
    run_config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was frozen in a step wakes when its successor has executed the same plan, and goes on with what is
    its: a crash between removing and writing would leave a result on the log without its checkpoint."""
    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0], 1)
    first = checkpointed(engine, tmp_path)
    files = {path: path.stat().st_ino for path in first.folder.iterdir()}
    assert checkpointed(engine, tmp_path) == first
    # Frozen later still, before the rename.
    rename, late = Path.rename, tmp_path / "late"

    def woken(self: Path, target: Path) -> Path:
        if not target.exists():
            monkeypatch.setattr(Path, "rename", rename)
            checkpointed(engine, late)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", woken)
    again = checkpointed(engine, late)
    assert {path: path.stat().st_ino for path in first.folder.iterdir()} == files
    assert again.state == first.state and [path.name for path in late.iterdir()] == [again.folder.name]
    run_step(engine, run_config, BATCHES[1], 2)
    assert checkpointed(engine, tmp_path).weights() == engine.policy.weights_bytes(), "another content replaces it"
