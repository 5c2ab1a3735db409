"""One training step from the rollouts of this rank's micro-batches. Live training and replay both come through here."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from schemas.ids import parse_policy_name
from schemas.records import BatchPlan, PlanRow, Rollout
from trainer import composition
from trainer.advantages.batch import Advantages, advantages_of
from trainer.advantages.graded import graded
from trainer.engine import Engine
from trainer.example import Example, example_of
from trainer.flops import packed_flops
from trainer.losses.settings import Loss
from trainer.objective import SUMMED, Counts, counts_from, objective
from trainer.pack import Pack, pack
from trainer.stop import Stop
from trainer.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Metrics and phases (seconds) of a step, for its StepResult."""

    metrics: dict[str, float]
    seconds: dict[str, float]


def train_step(
    engine: Engine,
    plan: BatchPlan,
    version: int,
    rollouts: Mapping[str, Rollout],
    loss: Loss,
    world: World,
    stop: Stop,
) -> Outcome:
    """Executes a plan on `version`: `rollouts` are this rank's, by key. Every rank calls it with the same plan, and
    no one waits in it for anything but the other ranks. Raises Diverged or Stopped; the adapter is then unchanged.
    """
    began = time.perf_counter()
    torch.manual_seed(plan.seed)
    rows = [row for row in plan.rows if row.rank == world.rank]
    advantages, planned = examples_of(rows, rollouts, loss, world)
    facts = _facts(rows, rollouts, planned, version, loss)
    # The denominators are fixed over all ranks before the first micro-batch.
    totals = dict(zip(facts, world.sum(torch.tensor(list(facts.values()), dtype=torch.float64)).tolist(), strict=True))
    counts = counts_from(totals)
    micro_batches = [batch.to(engine.device) for batch in packs_of(planned, loss)]
    packed = time.perf_counter()
    sums = torch.zeros(len(SUMMED) + 2, dtype=torch.float64)
    positions, flops = 0, 0.0
    shape = engine.policy.shape()
    for batch in micro_batches:
        stop.check()
        base = engine.policy.base_logprobs(batch) if loss.kl.coef > 0 and loss.kl.against == "base" else None
        likeliest = loss.topk.k if loss.opd_kind == "topk" and loss.opd_weight > 0 else 0
        scores = engine.forward(batch, loss.entropy_coef > 0, likeliest)
        total, part_sums = objective(scores, batch.signal, loss, counts, base)
        engine.backward(total)
        positions += len(batch.input_ids)
        flops += packed_flops(batch.spans, len(batch.targets), shape)
        sums[:-2] += torch.stack([part_sums[name].cpu().double() for name in SUMMED])
    if not micro_batches:
        engine.backward(engine.anchor())
    stop.check()
    computed = time.perf_counter()
    updated = engine.step(plan.step)
    stepped = time.perf_counter()
    sums[-2], sums[-1] = positions, flops
    totals |= dict(zip((*SUMMED, "positions", "model_flops"), world.sum(sums).tolist(), strict=True))
    if totals["trained_rollouts"] == 0:
        why = "equal rewards, no hints, or a weight of 0"
        log.warning("step %d: no rollout has an advantage (%s); it trains nothing", plan.step, why)
    return Outcome(
        _means(totals) | advantages.metrics | updated,
        {"pack": packed - began, "forward_backward": computed - packed, "optimizer": stepped - computed},
    )


def examples_of(
    rows: Sequence[PlanRow], rollouts: Mapping[str, Rollout], loss: Loss, world: World
) -> tuple[Advantages, list[list[Example]]]:
    """The advantages of the batch, and this rank's examples by micro-batch, both in the plan's order. A collective."""
    advantages = batch_advantages(rows, rollouts, loss, world)
    examples = {
        row.rollout_id: example_of(
            rollouts[row.rollout_id], advantages=advantages.of.get(row.rollout_id), opd=row.opd, loss=loss
        )
        for row in rows
    }
    return advantages, [[examples[key] for key in keys] for keys in _micro_batches(rows)]


def packs_of(planned: Iterable[Sequence[Example]], loss: Loss) -> list[Pack]:
    """The micro-batches in the plan's order, without what trains nothing; an empty one is left out."""
    trained = ([example for example in batch if example.trains(loss)] for batch in planned)
    return [pack(batch) for batch in trained if batch]


def batch_advantages(rows: Sequence[PlanRow], rollouts: Mapping[str, Rollout], loss: Loss, world: World) -> Advantages:
    """The advantages of the whole batch, the same on every rank. `rows` and `rollouts` are this rank's. A collective:
    groups and sessions may lie on several ranks."""
    own = [sample for row in rows if row.rl and (sample := graded(rollouts[row.rollout_id])) is not None]
    return advantages_of([sample for samples in world.gather(own) for sample in samples], loss)


def _micro_batches(rows: Iterable[PlanRow]) -> list[list[str]]:
    """Keys per micro-batch, both in the plan's order."""
    batches: dict[int, list[str]] = {}
    for row in rows:
        batches.setdefault(row.micro_batch, []).append(row.rollout_id)
    return [batches[number] for number in sorted(batches)]


def _facts(
    rows: Sequence[PlanRow],
    rollouts: Mapping[str, Rollout],
    planned: Sequence[Sequence[Example]],
    version: int,
    loss: Loss,
) -> dict[str, float]:
    """What is known of this rank's rows before the forward pass, as sums over rows."""
    rewards = [r for row in rows if row.rl and (r := rollouts[row.rollout_id].reward) is not None]
    staleness = [
        version - min(parse_policy_name(span.policy)[1] for span in rollouts[row.rollout_id].policy_spans)
        for row in rows
    ]
    signals = [example.signal for batch in planned for example in batch]
    return {
        "rollouts": float(len(rows)),
        "trained_rollouts": float(sum(example.trains(loss) for batch in planned for example in batch)),
        "tokens": float(sum(row.n_tokens for row in rows)),
        "rl_tokens": float(sum(int(signal.in_rl.sum()) for signal in signals)),
        "rl_advantage_abs": sum(float(signal.rl_advantages.abs().sum()) for signal in signals),
        "opd_advantage_abs": sum(float(signal.opd_advantages.abs().sum()) for signal in signals),
        "rewarded": float(len(rewards)),
        "reward": sum(rewards),
        "reward_squared": sum(reward * reward for reward in rewards),
        "staleness": float(sum(staleness)),
        **composition.counts([rollouts[row.rollout_id] for row in rows], version),
    } | {f"n_{name}": count for name, count in asdict(Counts.of(planned, loss)).items()}


def _means(totals: Mapping[str, float]) -> dict[str, float]:
    def mean(name: str, over: str) -> float:
        return totals[name] / totals[over] if totals[over] else 0.0

    reward = mean("reward", "rewarded")
    counts = ("rollouts", "trained_rollouts", "tokens", "rl_tokens", "positions", "model_flops")
    return {name: totals[name] for name in counts} | {
        **composition.metrics(totals),
        "opd_tokens": totals["n_opd"],
        "pairs": totals["n_pairs"],
        "reward_mean": reward,
        "reward_std": math.sqrt(max(0.0, mean("reward_squared", "rewarded") - reward * reward)),
        "staleness_mean": mean("staleness", "rollouts"),
        "rl_loss": mean("rl_loss", "n_rl"),
        "opd_loss": mean("opd_loss", "n_opd"),
        "opd_overlap": mean("overlap", "n_opd"),
        "kl_loss": mean("kl_loss", "n_tokens"),
        "pair_loss": mean("pair_loss", "n_pairs"),
        "rl_advantage_abs": mean("rl_advantage_abs", "rl_tokens"),
        "opd_advantage_abs": mean("opd_advantage_abs", "n_opd"),
        "rl_clip_fraction": mean("rl_clipped", "rl_tokens"),
        "opd_clip_fraction": mean("opd_clipped", "n_opd"),
        "ratio_mean": mean("ratio", "forwarded"),
        "logprob_gap": mean("logprob_gap", "forwarded"),
        "mismatch_kl": mean("mismatch_kl", "forwarded"),
        # (sum w)^2 / sum w^2 of the weights w = pi / mu, as a share of the tokens: 1 on policy.
        "effective_sample_size": totals["ratio"] ** 2 / (totals["ratio_squared"] * totals["forwarded"])
        if totals["forwarded"]
        else 0.0,
        "entropy": mean("entropy", "forwarded"),
    }
