"""Every number of a rollout at its bounds: a dead letter, dropped by name, or trained on to a finite step."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import BatchPlan, Rollout
from schemas.wire.codec import Codec, DecodeError
from tests.support.hostile_numbers import complete, hostile_numbers, numbers
from tests.support.trainer_lab import VOCAB, config, rollouts, tiny_model
from tests.unit.trainer.test_plan import CONTEXT
from tests.unit.trainer.test_step import engine_of
from trainer.config.loss import LossConfig
from trainer.data.candidates import Offer, ReadSegment, malformed_reason, offer_of, untrainable_tokens
from trainer.data.plan import BatchPlanner, plan_of
from trainer.distributed.ranks import join_ranks
from trainer.distributed.stop import StopRequest
from trainer.step.step import build_examples, pack_micro_batches, train_step

CODEC = Codec()
HONEST = rollouts(2, prefix="honest-")
STEPS = {"step_coef": 10.0}
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": STEPS,
    "grpo": STEPS | {"advantage": "group_mean_std", "aggregate": "sequence_mean"},
    "leave_one_out": {"advantage": "leave_one_out"},
    "stepwise": STEPS | {"advantage": "stepwise"},
    "gae": STEPS | {"advantage": "gae", "gae": {"values": "position", "rewards": "step"}},
    "topk": {"opd_kind": "topk", "topk": {"k": 1}, "kl": {"coef": 0.3}, "entropy_coef": 0.2},
    "pair": {"pair": {"weight": 0.7, "threshold": 0.5}},
}


@pytest.fixture(scope="module")
def read_back() -> dict[int, Rollout]:
    """The records by offset as a rank reads them, honest ones among them, without those that become dead letters."""
    found, dead = {}, Counter[str]()
    for offset, record in enumerate([*HONEST[:4], *hostile_numbers(), *HONEST[4:]]):
        value = CODEC.encode(topics.ROLLOUTS, record)
        expected = topics.table().records_of(topics.ROLLOUTS)
        try:
            rollout = CODEC.decode(value, topic=topics.ROLLOUTS, partition=0, offset=offset, expected=expected)
        except DecodeError as error:
            assert error.reason
            dead["not valid"] += 1
            continue
        assert isinstance(rollout, Rollout) and digest_holds(rollout)
        if malformed_reason(rollout, VOCAB) is None:
            found[offset] = rollout
        else:
            dead["malformed"] += 1
    assert dead.keys() == {"not valid", "malformed"}
    return found


def planned(read_back: dict[int, Rollout], loss: LossConfig) -> BatchPlan:
    """Plans all that can be trained on, as it is on the log afterwards."""
    offers: list[Offer] = []
    for offset, rollout in read_back.items():
        offer = offer_of(rollout, 0, offset, 1, 128, loss)
        reason = untrainable_tokens(rollout, VOCAB)
        offers.append(offer if reason is None else replace(offer, unfit=offer.unfit or reason))
    segment = ReadSegment(0, 0, max(read_back) + 1, tuple(offers))
    planner = BatchPlanner(len(offers), 1000, {}, {0: 0})
    planner.add_segment(ReadSegment.from_json(segment.to_json()))
    draft, _ = planner._form_batch(0)
    value = CODEC.encode(topics.BATCHES, plan_of(draft, replace(CONTEXT, micro_batch_tokens=4096), 1, 1, 0))
    plan = CODEC.decode(value, topic=topics.BATCHES, partition=0, offset=0)
    assert isinstance(plan, BatchPlan) and len(plan.rows) + sum(drop.count for drop in plan.drops) == len(offers)
    return plan


def test_every_field_of_a_rollout_is_among_the_hostile_ones() -> None:
    made = complete()
    fields = {place[0] for place in numbers(made)}
    other = {"rollout_id", "rollout_event_id", "result_id", "worker_id", "logprobs_mode", "has_rl", "has_opd", "hints"}
    other |= {"teacher_policy", "digest", "forgotten", "recorded_by"}
    assert fields | other == set(Rollout.model_fields) and not fields & other
    assert offer_of(made, 0, 0, 0, 128).unfit is None


@pytest.mark.parametrize("name", LOSSES)
def test_every_number_at_its_bounds_is_dropped_by_name_or_gives_finite_targets(
    read_back: dict[int, Rollout], name: str
) -> None:
    loss = LossConfig.model_validate(LOSSES[name])
    plan = planned(read_back, loss)
    rollouts_by_key = {each.key: each for each in read_back.values()}
    assert {each.key for each in HONEST if each.has_rl or loss.distils} <= {row.rollout_id for row in plan.rows}
    _, micro_batches = build_examples(plan.rows, rollouts_by_key, loss, join_ranks())
    for batch in pack_micro_batches(micro_batches, loss):
        targets = batch.token_targets
        for values in (targets.rl_advantages, targets.opd_advantages, targets.sampler_logprobs, targets.teacher_topk):
            assert bool(values.isfinite().all())


def test_all_that_is_let_through_makes_one_finite_step(
    read_back: dict[int, Rollout], tmp_path_factory: pytest.TempPathFactory
) -> None:
    loss = LOSSES["grpo"] | LOSSES["topk"]
    run_config = config(tiny_model(tmp_path_factory.mktemp("model")), loss=loss)
    plan = planned(read_back, run_config.loss)
    by_key = {each.key: each for each in read_back.values()}
    output = train_step(engine_of(run_config), plan, 0, by_key, run_config.loss, join_ranks(), StopRequest())
    assert output.metrics["rollouts"] == len(plan.rows) > 100 and output.metrics["grad_norm"] > 0
