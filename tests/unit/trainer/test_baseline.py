"""The running baseline of answers without a group: its value, its place in the plan, and its use in a step."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.digest import record_digest
from schemas.records.halves import TokenSpan
from schemas.tensors import float32_bytes
from tests.support.trainer_lab import rollout
from trainer.advantages.baseline import RunningBaseline
from trainer.advantages.batch import estimate_advantages
from trainer.advantages.rewarded_sample import rewarded_sample
from trainer.config.loss import LossConfig
from trainer.data.candidates import offer_of
from trainer.data.plan import BatchDraft, PlanContext, next_attempt, plan_of

CONTEXT = PlanContext("run", "tiny", "m", 1, 100, 5, "owner")
STEPS = st.lists(st.lists(st.floats(-1.0, 1.0), max_size=6), min_size=1, max_size=8)
DECAYS = st.just(0.0) | st.floats(0.01, 0.99)
"""Seven powers of a smaller one may leave the precise numbers."""


def metrics_of(rewards: list[float]) -> dict[str, float]:
    return {"single_rewards": sum(rewards), "single_answers": float(len(rewards)), "rl_loss": 0.5}


def after(steps: list[list[float]], decay: float) -> RunningBaseline:
    """The baseline after the steps; each reads it from the metrics of the one before, as after a restart."""
    metrics: dict[str, float] = {}
    for rewards in steps:
        found = RunningBaseline.of_metrics(metrics).after(metrics_of(rewards), decay)
        metrics = metrics_of(rewards) | found.metrics()
    return RunningBaseline.of_metrics(metrics)


@given(STEPS, DECAYS)
def test_it_is_the_mean_of_earlier_rewards_weighted_by_age(steps: list[list[float]], decay: float) -> None:
    weights = [decay ** (len(steps) - 1 - age) for age, rewards in enumerate(steps) for _ in rewards]
    found, rewards = after(steps, decay), [reward for each in steps for reward in each]
    if sum(weights) == 0.0:
        assert found.mean is None
        return
    expected = sum(weight * reward for weight, reward in zip(weights, rewards, strict=True)) / sum(weights)
    assert found.mean is not None and found.mean == pytest.approx(expected, abs=1e-9)
    assert min(rewards) - 1e-9 <= found.mean <= max(rewards) + 1e-9


@given(STEPS, DECAYS, st.floats(-0.5, 0.5))
def test_a_reward_that_is_higher_everywhere_changes_no_advantage(
    steps: list[list[float]], decay: float, shift: float
) -> None:
    plain, shifted = after(steps, decay), after([[reward + shift for reward in each] for each in steps], decay)
    if plain.mean is None or shifted.mean is None or plain.answers < 1e-6:
        return
    assert 0.25 + shift - shifted.mean == pytest.approx(0.25 - plain.mean, abs=1e-6)


def test_a_step_without_single_answers_keeps_the_mean() -> None:
    before = after([[1.0, 0.0]], 0.9)
    assert before.after(metrics_of([]), 0.9).mean == before.mean == 0.5
    assert RunningBaseline().after(metrics_of([]), 0.9).mean is None


def advantages(rewards: list[float], baseline: float | None, **loss: Any) -> dict[str, float]:
    samples = [rewarded_sample(rollout(f"t{i}", reward=reward)) for i, reward in enumerate(rewards)]
    found = estimate_advantages([s for s in samples if s is not None], LossConfig(**loss), baseline)
    return {key: spans[0][2] for key, spans in found.by_rollout.items()}


@pytest.mark.parametrize("name", ["group_mean", "group_mean_std", "leave_one_out", "dr_grpo"])
def test_a_single_answer_is_compared_with_it(name: str) -> None:
    more = {"advantage": name, "aggregate_length": 10}
    assert advantages([1.0, 0.0], 0.25, **more) == {"t0/0": 0.75, "t1/0": -0.25}
    assert advantages([1.0, 0.0], None, **more) == {"t0/0": 1.0, "t1/0": 0.0}


@pytest.mark.parametrize("name", ["reward", "binary", "stepwise", "gae"])
def test_the_other_estimators_take_the_reward(name: str) -> None:
    assert advantages([1.0, 0.5], 0.25, advantage=name) == {"t0/0": 1.0, "t1/0": 0.5}


def test_a_group_is_compared_with_itself_alone() -> None:
    group = [rollout("g", index, reward=float(index), rewards=[0.0, 1.0], n=2) for index in range(2)]
    samples = [sample for each in group if (sample := rewarded_sample(each)) is not None]
    found = estimate_advantages(samples, LossConfig(), 0.25).by_rollout
    assert [spans[0][2] for spans in found.values()] == [-0.5, 0.5]


def test_rewards_that_are_always_the_same_train_nothing() -> None:
    mean = after([[0.7] * 3] * 5, 0.9).mean
    assert advantages([0.7], mean) == {"t0/0": 0.0}


@pytest.mark.parametrize(
    ("loss", "shaped"), [({"overlong": {"length": 3, "buffer": 2}}, 0.0), ({"step_coef": 0.5}, 1.25), ({}, 1.0)]
)
def test_answers_that_are_always_shaped_alike_train_nothing_in_the_end(loss: dict[str, Any], shaped: float) -> None:
    """The mean is that of the rewards from which it is subtracted: with the punishment and with the scores of steps."""
    steps: dict[str, Any] = {"step_spans": (TokenSpan(start=4, end=7),), "step_scores": float32_bytes([0.5])}
    samples = [sample for i in range(2) if (sample := rewarded_sample(rollout(f"t{i}", reward=1.0, **steps)))]
    group = [rollout("g", index, reward=float(index), rewards=[0.0, 1.0], n=2) for index in range(2)]
    samples += [sample for each in group if (sample := rewarded_sample(each)) is not None]
    baseline = RunningBaseline()
    for number in range(3):
        found = estimate_advantages(samples, LossConfig(**loss), baseline.mean)
        assert found.by_rollout["t0/0"][0][2] == pytest.approx(0.0 if number else shaped)
        assert found.metrics["single_answers"] == 2.0
        assert found.metrics["single_rewards"] == pytest.approx(2 * shaped)
        baseline = baseline.after(found.metrics, 0.9)


def test_the_sums_are_the_same_for_any_order_of_the_ranks() -> None:
    samples = [s for i in range(9) if (s := rewarded_sample(rollout(f"t{i}", reward=0.1 * i - 0.37)))]
    orders = (samples, samples[::-1], samples[4:] + samples[:4])
    assert len({estimate_advantages(each, LossConfig()).metrics["single_rewards"] for each in orders}) == 1


def test_the_sum_is_that_of_one_addition_after_the_other_under_every_python() -> None:
    samples = [s for i in range(10) if (s := rewarded_sample(rollout(f"t{i}", reward=0.1)))]
    assert estimate_advantages(samples, LossConfig()).metrics["single_rewards"] == 0.9999999999999999


def test_a_plan_records_it_and_so_does_its_next_attempt() -> None:
    rollouts = [rollout(f"t{i}") for i in range(2)]
    draft = BatchDraft(tuple(offer_of(each, 0, i, 0, 128) for i, each in enumerate(rollouts)), (), {0: 2}, ())
    with_it = replace(CONTEXT, baseline=0.25)
    plan = plan_of(draft, with_it, 2, 1, 0)
    assert plan.baseline == 0.25
    assert next_attempt(plan, with_it, 0, {each.rollout_id: each for each in rollouts}).baseline == 0.25
    without = plan_of(draft, CONTEXT, 2, 1, 0)
    assert without.baseline is None and without.plan_id != plan.plan_id
    # The ids of plans that were written before the field existed stay valid.
    ignored = {"plan_id", "event_time", "owner"}
    assert record_digest(without, ignored) == record_digest(without, ignored | {"baseline"}) == without.plan_id
