"""One step over two ranks is the step over one, also where groups and sessions lie on both."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from schemas.records import Rollout, TokenSpan
from schemas.tensors import float32_bytes, int32_bytes
from tests.support import forked
from tests.support.trainer_lab import VOCAB, config, rollouts, tiny_model
from tests.unit.trainer import test_culprits, test_full
from trainer.config.loss import LossConfig
from trainer.data.candidates import offer_of
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.distributed.ranks import join_ranks
from trainer.distributed.stop import StopRequest
from trainer.step.engine import TrainingEngine
from trainer.step.step import train_step

LOSSES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "stepwise": {"advantage": "stepwise", "aggregate": "sequence_mean"},
    "gae": {"advantage": "gae", "kind": "gspo", "gae": {"values": "position"}},
    "overlong": {"kind": "dapo", "overlong": {"length": 10, "buffer": 8}},
    "topk": {"opd_kind": "topk", "topk": {"k": 2}, "kl": {"coef": 0.1, "against": "base"}},
    "pair": {"pair": {"weight": 0.5, "threshold": 0.5}, "kl": {"coef": 0.1}, "entropy_coef": 0.1},
}


def batch() -> list[Rollout]:
    """Groups with scored steps, the turns of three sessions."""
    made = []
    for number, each in enumerate(rollouts(3, 4, seed=5)):
        start = each.loss_mask.index(1)
        middle = (start + each.n_tokens + 1) // 2
        head = each.head.model_copy(update={"session_id": f"s{number % 3}", "turn_index": number // 3})
        spans = (TokenSpan(start=start, end=middle), TokenSpan(start=middle, end=each.n_tokens))
        more = {"step_spans": spans, "step_scores": float32_bytes([0.1 * number, 0.5])}
        if each.has_opd:
            ids = [(7 * at + number) % VOCAB + i for at in range(1, each.n_tokens + 1) for i in (0, -1)]
            more |= {"topk": 2, "topk_ids": int32_bytes([max(0, id) for id in ids])}
            more |= {"topk_logprobs": float32_bytes([-0.5, -1.5] * each.n_tokens)}
        made.append(each.model_copy(update={"head": head} | more))
    return made


def step(model: Path, name: str, size: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The adapter after one step of this rank, and the step's metrics."""
    loss = LossConfig.model_validate(LOSSES[name])
    rank_group = join_ranks()
    assert rank_group.size == size
    # With a small eps Adam's first step is the sign of the gradient, and rounding decides where that is almost 0.
    engine = TrainingEngine(config(model, optimizer={"lr": 0.01, "eps": 1e-3}), model, rank_group, "cpu")
    made = batch()
    offers = tuple(offer_of(r, 0, i, 0, 128, loss) for i, r in enumerate(made))
    context = PlanContext("run", "tiny", "m", size, 30, 0, "owner", loss.pair.weight > 0)
    plan = plan_of(BatchDraft(offers, (), {0: len(offers)}, ()), context, 1, 1, 0)
    assert {row.rank for row in plan.rows} == set(range(size))
    own = {r.rollout_id: r for r in made if any(row.rollout_id == r.rollout_id for row in plan.rows)}
    output = train_step(engine, plan, 0, own, loss, rank_group, StopRequest())
    return {n: p.detach().clone() for n, p in engine.policy.trained_parameters()}, output.metrics


def run_rank(argument: str) -> int:
    """One of the two ranks, in a process of its own. `argument` has the model's folder and that for what it finds."""
    model, folder = map(Path, argument.splitlines())
    test_culprits.two_ranks(folder)
    for settings in test_full.RANKS_SETTINGS:
        test_full.two_ranks(folder, settings)
    for name in LOSSES:
        weights, measured = step(model, name, 2)
        if join_ranks().rank == 0:
            metrics = {f"metric.{key}": torch.tensor(value, dtype=torch.float64) for key, value in measured.items()}
            save_file(weights | metrics, folder / f"{name}.safetensors")
    return 0


class TwoRanks:
    """Two processes, which end by themselves, and the folder for what they find."""

    def __init__(self, folder: Path, model: Path, port: int) -> None:
        self.folder, self._log = folder, folder / "ranks.log"
        self.processes = [
            forked.start(
                run_rank,
                f"{model}\n{folder}",
                os.environ | forked.rank_environment(port, rank, 2),
                self._log,
                self._log,
            )
            for rank in range(2)
        ]

    def wait(self) -> None:
        """Waits until both have ended without an error."""
        for process in self.processes:
            process.join(400)
            assert process.exitcode == 0, self._log.read_text()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_model(folder / "model")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    ranks = TwoRanks(folder, model, store.port)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            forked.end(process)


def test_a_step_over_two_ranks_is_the_step_over_one(two: TwoRanks) -> None:
    folder = two.folder
    alone = {name: step(folder / "model", name, 1) for name in LOSSES}
    two.wait()
    for name, (parameters, metrics) in alone.items():
        found = load_file(folder / f"{name}.safetensors")
        for key, value in parameters.items():
            torch.testing.assert_close(
                found[key], value, atol=1e-5, rtol=1e-3, msg=lambda text, at=f"{name}: {key}": f"{at}: {text}"
            )
        for key in ("rl_loss", "opd_loss", "kl_loss", "pair_loss", "grad_norm", "rl_tokens", "pairs"):
            assert float(found[f"metric.{key}"]) == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), (name, key)
        assert metrics["grad_norm"] > 0


def test_sharded_moments_give_the_same_bytes_again_and_over_a_checkpoint(two: TwoRanks) -> None:
    two.wait()
    plain, clipped = (json.loads((two.folder / f"{name}.json").read_text()) for name in test_full.RANKS_SETTINGS)
    # Without clipping the parts are updated as the whole is. The norm is summed in another order.
    assert len(set(plain.values())) == 1, plain
    assert clipped["1"] == clipped["1 resumed"] and clipped["0"] == clipped["0 resumed"], clipped
    assert clipped["1"] != plain["1"]


def test_both_ranks_find_the_poison_of_one_and_go_on_without_a_trace(two: TwoRanks) -> None:
    two.wait()
    found = json.loads((two.folder / "culprits.json").read_text())
    assert found.keys() == test_culprits.RANKS_SETTINGS.keys()
    for name, of in found.items():
        assert of["culprits"] == [{f"p{step}/0": test_culprits.NOT_FINITE} for step in range(2)], name
        struck, calm = of["hashes"]
        assert struck == calm, name
