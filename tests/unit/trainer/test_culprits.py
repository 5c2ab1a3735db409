"""A step that is not finite: which rollouts cause it, and that nothing else is touched."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.bounds import MIN_TEMPERATURE, out_of_bounds
from schemas.digest import with_digest
from schemas.records import Rollout, TokenSpan
from schemas.tensors import float32_bytes
from tests.support.trainer_lab import config, rollout, rollouts, tiny_model
from tests.unit.trainer.test_plan import CONTEXT
from tests.unit.trainer.test_step import engine_of, plan_for
from trainer.config.trainer_config import TrainerConfig
from trainer.data.candidates import offer_of
from trainer.data.plan import PlanContext, next_attempt
from trainer.distributed import ranks
from trainer.distributed.stop import StopRequest
from trainer.model.policy import adapter_sha256
from trainer.step import culprits as culprits_module
from trainer.step.culprits import NOT_FINITE, culprits_among, find_culprits
from trainer.step.engine import StepNotFinite, TrainingDiverged, TrainingEngine
from trainer.step.step import train_step

HONEST = rollouts(2, 4, prefix="honest-")


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return config(tiny_model(tmp_path_factory.mktemp("model")))


def poisoned(task_id: str, **more: Any) -> Rollout:
    """A rollout as a release without bounds planned it."""
    return rollout(task_id, **({"temperature": 1e-39} | more))


def planned(batch: Sequence[Rollout]) -> Any:
    """The plan of a release without bounds."""
    fit = {r.key: rollout(r.head.task_id, r.sample_index, n=r.n_requested, rewards=[0.0, 1.0]) for r in batch}
    rows = {row.rollout_id: row for row in plan_for(list(fit.values())).rows}
    return plan_for(list(fit.values())).model_copy(
        update={
            "rows": tuple(
                rows[r.key].model_copy(update={"digest": r.digest, "rl": r.has_rl, "opd": r.has_opd}) for r in batch
            )
        }
    )


def arguments(engine: TrainingEngine, run_config: TrainerConfig, plan: Any, batch: Sequence[Rollout]) -> Any:
    return engine, plan, 0, {r.key: r for r in batch}, run_config.loss, ranks.join_ranks(), StopRequest()


def test_a_poisoned_rollout_is_found_and_the_step_without_it_gives_the_bytes_of_a_run_that_never_had_it(
    run_config: TrainerConfig,
) -> None:
    """Twice with moments in between: a discarded gradient must leave no trace in them."""
    struck, calm = engine_of(run_config), engine_of(run_config)
    for step in range(2):
        honest = rollouts(2, 4, seed=step, prefix=f"h{step}-")
        batch = [*honest[:3], poisoned(f"p{step}"), *honest[3:]]
        plan, before = planned(batch), struck.policy.weights_bytes()
        given_to = arguments(struck, run_config, plan, batch)
        with pytest.raises(StepNotFinite, match="not finite"):
            train_step(*given_to)
        assert find_culprits(*given_to) == {f"p{step}/0": "temperature out of bounds"}
        assert struck.policy.weights_bytes() == before
        next_plan = next_attempt(plan, CONTEXT, 0, {r.key: r for r in batch}, {f"p{step}/0": NOT_FINITE})
        assert [row.rollout_id for row in next_plan.rows] == [r.key for r in honest]
        assert (next_plan.attempt, next_plan.drops[-1].reason, next_plan.drops[-1].count) == (2, NOT_FINITE, 1)
        for engine in (struck, calm):
            train_step(*arguments(engine, run_config, next_plan, honest))
    assert struck.policy.weights_bytes() == calm.policy.weights_bytes() != before
    theirs = calm.optimizer_state()
    assert struck.optimizer_state().steps == theirs.steps == 2
    assert all(torch.equal(moment, theirs.moments[name]) for name, moment in struck.optimizer_state().moments.items())


@pytest.mark.parametrize("temperature", [1e-300, 1e39, 1e308])
def test_a_temperature_beyond_float32_is_found_too(run_config: TrainerConfig, temperature: float) -> None:
    engine, batch = engine_of(run_config), [*HONEST, poisoned("p", temperature=temperature)]
    given_to = arguments(engine, run_config, planned(batch), batch)
    with pytest.raises(StepNotFinite, match="not finite"):
        train_step(*given_to)
    assert find_culprits(*given_to) == {"p/0": "temperature out of bounds"}


def test_a_cause_that_no_bound_names_is_found_by_bisection(
    run_config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.step.culprits.out_of_bounds", lambda _: None)
    scores = {"step_scores": float32_bytes([3e38]), "step_spans": (TokenSpan(start=0, end=7),)}
    shaped = run_config.model_copy(update={"loss": run_config.loss.model_copy(update={"step_coef": 10.0})})
    batch = [*HONEST[:5], poisoned("p0"), *HONEST[5:], poisoned("p1", temperature=1.0, **scores)]
    engine = engine_of(shaped)
    found = find_culprits(*arguments(engine, shaped, planned(batch), batch))
    assert found == dict.fromkeys(("p0/0", "p1/0"), NOT_FINITE)


def test_a_plan_of_poisoned_rollouts_alone_becomes_a_step_that_trains_nothing(run_config: TrainerConfig) -> None:
    engine = engine_of(run_config)
    batch = [poisoned(f"p{k}") for k in range(3)]
    plan, before = planned(batch), engine.policy.weights_bytes()
    given_to = arguments(engine, run_config, plan, batch)
    with pytest.raises(StepNotFinite):
        train_step(*given_to)
    found = find_culprits(*given_to)
    next_plan = next_attempt(plan, CONTEXT, 0, {r.key: r for r in batch}, found)
    assert (len(found), next_plan.rows, len(next_plan.drops)) == (3, (), 3)
    output = train_step(*arguments(engine, run_config, next_plan, []))
    assert output.metrics["trained_rollouts"] == 0 and engine.policy.weights_bytes() == before


def test_metrics_that_are_not_finite_update_nothing_either(run_config: TrainerConfig) -> None:
    """They could not be written: the trainer would fail at the same place at every start."""
    distilled = run_config.model_copy(update={"loss": run_config.loss.model_copy(update={"rl_weight": 0.0})})
    engine = engine_of(distilled)
    batch = [*HONEST, rollout("p", reward=1.0)]
    before = engine.policy.weights_bytes()
    huge = with_digest(batch[-1].model_copy(update={"reward": 1e39}))
    with pytest.raises(StepNotFinite, match="rl_advantage_abs"):
        train_step(*arguments(engine, distilled, planned(batch), [*HONEST, huge]))
    assert engine.policy.weights_bytes() == before


def test_a_policy_that_is_not_finite_is_not_the_fault_of_its_rollouts(run_config: TrainerConfig) -> None:
    engine = engine_of(run_config)
    with torch.no_grad():
        engine.policy.trained_parameters()[0][1].fill_(float("inf"))
    given_to = arguments(engine, run_config, planned(HONEST), HONEST)
    with pytest.raises(StepNotFinite):
        train_step(*given_to)
    with pytest.raises(TrainingDiverged, match="whatever the rollouts"):
        find_culprits(*given_to)


def test_a_step_that_is_finite_when_recomputed_drops_no_rollout(run_config: TrainerConfig) -> None:
    with pytest.raises(TrainingDiverged, match="the machine computes wrongly"):
        find_culprits(*arguments(engine_of(run_config), run_config, planned(HONEST), HONEST))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 24), st.data())
def test_the_rest_is_finite_and_who_is_finite_alone_and_with_everybody_else_stays(n: int, data: st.DataObject) -> None:
    keys = [str(k) for k in range(n)]
    alone = set(data.draw(st.lists(st.sampled_from(keys), max_size=4)))
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(keys), st.sampled_from(keys)), max_size=3))
    asked: list[Sequence[str]] = []

    def finite(part: Sequence[str]) -> bool:
        asked.append(part)
        return not alone & set(part) and not any({a, b} <= set(part) for a, b in pairs)

    found = culprits_among(keys, finite)
    assert alone <= set(found) <= alone | {key for pair in pairs for key in pair}
    rest = [key for key in keys if key not in found]
    assert not rest or finite(rest)
    assert len(asked) <= 4 + 4 * (len(found) + len(pairs)) * (1 + n.bit_length())


BAD = (
    {"temperature": 1e-39},
    {"temperature": np.nextafter(MIN_TEMPERATURE, 0.0)},
    {"temperature": 1e30},
    {"sampler": [-1.0, -1e5, -1.0]},
    {"sampler": [-1.0, 0.5, -1.0]},
    {"teacher": [-1.0, -3e38, -1.0]},
    {"step_scores": float32_bytes([3e38]), "step_spans": (TokenSpan(start=0, end=7),)},
    {"group_std": -1e-4, "n": 2},
    {"group_mean": 1e30, "n": 2},
)


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_what_is_out_of_bounds_is_dropped_with_the_reason(fields: dict[str, Any]) -> None:
    record = rollout("p", **fields)
    reason = out_of_bounds(record)
    assert reason is not None and offer_of(record, 0, 0, 0, 128).unfit == reason


def test_bounds_leave_honest_rollouts_and_tokens_that_are_left_out_alone() -> None:
    odd = rollout("o", sampler=[-9999.0, float("nan"), float("-inf")], teacher=[float("nan"), 0.0, 1e-6])
    edges = [rollout("e", temperature=t) for t in (MIN_TEMPERATURE, 100.0)]
    for record in (*HONEST, odd, *edges):
        assert out_of_bounds(record) is None and offer_of(record, 0, 0, 0, 128).unfit is None
    assert offer_of(rollout("g", temperature=0.0), 0, 0, 0, 128).unfit == "greedy sampling"


RANKS_SETTINGS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "whole": {"lora": None, "optimizer": {"lr": 1e-3}},
    "sharded": {"lora": None, "optimizer": {"lr": 1e-3}, "zero_stage": 1},
}


def two_ranks(folder: Path) -> None:
    """One rank of two (test_ranks.py): finds poison by bisection that the other rank may have. Rank 0 writes, by
    setting, the culprits of each step, and sha256 of the weights with and without the poison."""
    rank_group, model, written = ranks.join_ranks(), folder / "model", {}
    bounds, culprits_module.out_of_bounds = culprits_module.out_of_bounds, lambda _: None
    context = PlanContext("run", "tiny", "m", 2, 40, 0, "owner")
    for name, more in RANKS_SETTINGS.items():
        run_config = config(model, **more)
        struck, calm = (TrainingEngine(run_config, model, rank_group, "cpu") for _ in range(2))
        culprits = []
        for engine in (struck, calm):
            engine.load_initial_weights()
        for step in range(2):
            honest = rollouts(2, 4, seed=step, prefix=f"h{step}-")
            batch = {r.key: r for r in [*honest[:3], poisoned(f"p{step}"), *honest[3:]]}
            plan = next_attempt(planned(list(batch.values())), context, 0, batch)
            given_to = arguments(struck, run_config, plan, own_rows(plan, batch, rank_group.rank))
            with pytest.raises(StepNotFinite):
                train_step(*given_to)
            culprits.append(find_culprits(*given_to))
            assert rank_group.gather(culprits[-1]) == [culprits[-1]] * 2
            next_plan = next_attempt(plan, context, 0, batch, culprits[-1])
            for engine in (struck, calm):
                train_step(*arguments(engine, run_config, next_plan, own_rows(next_plan, batch, rank_group.rank)))
        hashes = [adapter_sha256(engine.policy.weights_bytes()) for engine in (struck, calm)]
        written[name] = {"culprits": culprits, "hashes": hashes}
    culprits_module.out_of_bounds = bounds
    if rank_group.rank == 0:
        (folder / "culprits.json").write_text(json.dumps(written))


def own_rows(plan: Any, batch: dict[str, Rollout], rank: int) -> list[Rollout]:
    return [batch[row.rollout_id] for row in plan.rows if row.rank == rank]
