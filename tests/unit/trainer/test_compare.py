"""Distances between adapters and policies, against the sums written out."""

import math

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.support.trainer_lab import rollout
from trainer.replay.compare import kl_sum, limit_positions, update_distance
from trainer.replay.job import redistribute


def adapter(seed: int, rank: int, layers: int = 2) -> tuple[bytes, dict[str, Tensor]]:
    """An adapter as a file, and its updates B A."""
    draw = torch.Generator().manual_seed(seed)
    tensors, updates = {}, {}
    for layer in range(layers):
        a, b = torch.randn(rank, 5, generator=draw), torch.randn(7, rank, generator=draw)
        tensors |= {f"m.{layer}.lora_A.weight": a, f"m.{layer}.lora_B.weight": b}
        updates[str(layer)] = b.double() @ a.double()
    return save(tensors), updates


def test_the_distance_is_that_of_the_updates_whatever_the_ranks() -> None:
    (one, of_one), (other, of_other) = adapter(1, 3), adapter(2, 4)
    expected = math.sqrt(sum(float(((2.0 * of_other[k] - 0.5 * of_one[k]) ** 2).sum()) for k in of_one))
    norm = math.sqrt(sum(float(((0.5 * of_one[k]) ** 2).sum()) for k in of_one))
    distance = update_distance(one, other, 0.5, 2.0)
    assert distance.absolute == pytest.approx(expected, rel=1e-12)
    assert distance.relative == pytest.approx(expected / norm, rel=1e-12)
    assert update_distance(one, one).absolute < 1e-6


def test_a_layer_that_one_lacks_counts_as_no_update() -> None:
    (one, of_one), (two, of_two) = adapter(1, 3, 1), adapter(1, 3, 2)
    assert of_one["0"].equal(of_two["0"])
    assert update_distance(one, two).absolute == pytest.approx(float(of_two["1"].norm()), rel=1e-12)


def test_from_no_update_no_share_can_be_told() -> None:
    zero = save({"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.zeros(4, 2)})
    some = save({"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.ones(4, 2)})
    assert math.isnan(update_distance(zero, some).relative) and update_distance(zero, zero).relative == 0.0


def test_kl_over_the_vocabulary_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    first, second, head = (torch.randn(n, 6, generator=draw) for n in (9, 9, 11))
    p, q = ((h @ head.T).double().softmax(-1) for h in (first, second))
    expected = float((p * (p.log() - q.log())).sum())
    assert kl_sum(first, second, head) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("trainer.replay.compare.CHUNK_BYTES", 4 * 11 * 2)
    assert kl_sum(first, second, head) == pytest.approx(expected, rel=1e-5)
    assert kl_sum(first, first, head) == 0.0


def test_sequences_until_there_are_tokens_enough() -> None:
    sequences = [(torch.arange(5), torch.arange(n)) for n in (2, 2, 2)]
    assert len(list(limit_positions(sequences, 3))) == 2 and len(list(limit_positions(sequences, 1))) == 1


def test_a_plan_for_another_number_of_ranks_keeps_its_micro_batches() -> None:
    from schemas.records import BatchPlan, PlanRow

    made = rollout()
    places = [(0, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
    row = PlanRow(
        rollout_id="r", digest=made.digest, partition=0, offset=0, n_tokens=1, rl=True, opd=False, rank=0, micro_batch=0
    )
    rows = tuple(
        row.model_copy(update={"rollout_id": f"r{i}", "rank": rank, "micro_batch": m})
        for i, (rank, m) in enumerate(places)
    )
    plan = BatchPlan(
        run_id="r",
        step=1,
        attempt=1,
        plan_id="-",
        event_time=1,
        manifest_digest="-",
        policy="p",
        topic="t",
        rows=rows,
        world_size=2,
        seed=0,
        owner="o",
    )
    alone = redistribute(plan, 1)
    assert [(row.rank, row.micro_batch) for row in alone.rows] == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3)]
    three = redistribute(plan, 3)
    assert [(row.rank, row.micro_batch) for row in three.rows] == [(0, 0), (0, 0), (1, 0), (2, 0), (0, 1)]
    assert redistribute(plan, 2) is plan and alone.plan_id == plan.plan_id
