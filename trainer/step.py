"""One training step from the rollouts of this rank's micro-batches. Live training and replay both come through here."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.ids import parse_policy_name
from schemas.records import BatchPlan, PlanRow, Rollout
from trainer.config import Loss
from trainer.engine import Engine
from trainer.logprobs import TokenScores
from trainer.loss import clipped_surrogate
from trainer.pack import Example, Pack, example_of, pack
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
    examples = {
        row.rollout_id: example_of(
            rollouts[row.rollout_id], rl=row.rl, opd=row.opd, estimator=loss.advantage, opd_clip=loss.opd_clip
        )
        for row in rows
    }
    facts = _facts(rows, rollouts, examples, version)
    # The denominators are fixed over all ranks before the first micro-batch.
    totals = dict(zip(facts, world.sum(torch.tensor(list(facts.values()), dtype=torch.float64)).tolist(), strict=True))
    micro_batches = [
        pack(trained).to(engine.device)
        for keys in _micro_batches(rows)
        if (trained := [examples[key] for key in keys if examples[key].trains])
    ]
    packed = time.perf_counter()
    sums = torch.zeros(len(SUMMED), dtype=torch.float64)
    for batch in micro_batches:
        stop.check()
        scores = engine.forward(batch)
        total, part_sums = micro_batch_loss(scores, batch, loss, totals["rl_tokens"], totals["opd_tokens"])
        engine.backward(total)
        sums += torch.stack([part_sums[name].cpu().double() for name in SUMMED])
    if not micro_batches:
        engine.backward(engine.anchor())
    stop.check()
    computed = time.perf_counter()
    grad_norm = engine.step(plan.step)
    stepped = time.perf_counter()
    totals |= dict(zip(SUMMED, world.sum(sums).tolist(), strict=True))
    if totals["trained_rollouts"] == 0:
        log.warning("step %d: no rollout has an advantage (equal rewards, no hints); it trains nothing", plan.step)
    return Outcome(
        _means(totals) | {"grad_norm": grad_norm},
        {"pack": packed - began, "forward_backward": computed - packed, "optimizer": stepped - computed},
    )


SUMMED = (
    "rl_loss",
    "opd_loss",
    "rl_clipped",
    "opd_clipped",
    "ratio",
    "mismatch_kl",
    "entropy",
    "forwarded",
    "positions",
)


def micro_batch_loss(
    scores: TokenScores, batch: Pack, loss: Loss, n_rl: float, n_opd: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the batch's loss, and the sums (SUMMED) for its metrics, detached."""
    logprobs = scores.logprobs
    total = logprobs.sum() * 0.0
    zero = torch.zeros((), device=logprobs.device)
    sums = {name: zero for name in SUMMED}
    bounds = {"clip_low": loss.clip_low, "clip_high": loss.clip_high, "log_ratio_clamp": loss.log_ratio_clamp}
    parts = (
        ("rl", batch.in_rl, batch.rl_advantages, loss.rl_weight, n_rl),
        ("opd", batch.in_opd, batch.opd_advantages, loss.opd_weight, n_opd),
    )
    for name, chosen, advantages, weight, count in parts:
        if not bool(chosen.any()):
            continue
        value, metrics = clipped_surrogate(
            logprobs[chosen], batch.sampler_logprobs[chosen], advantages[chosen], **bounds
        )
        total = total + value * (weight / count)
        sums[f"{name}_loss"], sums[f"{name}_clipped"] = value.detach(), metrics["clipped"]
    with torch.no_grad():
        _, metrics = clipped_surrogate(logprobs, batch.sampler_logprobs, torch.zeros_like(logprobs), **bounds)
    sums |= {
        "ratio": metrics["ratio"],
        "mismatch_kl": metrics["mismatch_kl"],
        "entropy": scores.entropies.detach().sum(),
        "forwarded": zero + len(logprobs),
        "positions": zero + len(batch.input_ids),
    }
    return total, sums


def _micro_batches(rows: Iterable[PlanRow]) -> list[list[str]]:
    """Keys per micro-batch, both in the plan's order."""
    batches: dict[int, list[str]] = {}
    for row in rows:
        batches.setdefault(row.micro_batch, []).append(row.rollout_id)
    return [batches[number] for number in sorted(batches)]


def _facts(
    rows: Sequence[PlanRow], rollouts: Mapping[str, Rollout], examples: Mapping[str, Example], version: int
) -> dict[str, float]:
    """What is known of this rank's rows before the forward pass, as sums over rows."""
    rewards = [r for row in rows if row.rl and (r := rollouts[row.rollout_id].reward) is not None]
    staleness = [
        version - min(parse_policy_name(span.policy)[1] for span in rollouts[row.rollout_id].policy_spans)
        for row in rows
    ]
    used = [examples[row.rollout_id] for row in rows]
    return {
        "rollouts": float(len(rows)),
        "trained_rollouts": float(sum(example.trains for example in used)),
        "tokens": float(sum(row.n_tokens for row in rows)),
        "rl_tokens": float(sum(int(example.in_rl.sum()) for example in used)),
        "opd_tokens": float(sum(int(example.in_opd.sum()) for example in used)),
        "rl_advantage_abs": sum(float(example.rl_advantages.abs().sum()) for example in used),
        "opd_advantage_abs": sum(float(example.opd_advantages.abs().sum()) for example in used),
        "rewarded": float(len(rewards)),
        "reward": sum(rewards),
        "reward_squared": sum(reward * reward for reward in rewards),
        "staleness": float(sum(staleness)),
    }


def _means(totals: Mapping[str, float]) -> dict[str, float]:
    def mean(name: str, over: str) -> float:
        return totals[name] / totals[over] if totals[over] else 0.0

    reward = mean("reward", "rewarded")
    counts = ("rollouts", "trained_rollouts", "tokens", "rl_tokens", "opd_tokens", "positions")
    return {name: totals[name] for name in counts} | {
        "reward_mean": reward,
        "reward_std": math.sqrt(max(0.0, mean("reward_squared", "rewarded") - reward * reward)),
        "staleness_mean": mean("staleness", "rollouts"),
        "rl_loss": mean("rl_loss", "rl_tokens"),
        "opd_loss": mean("opd_loss", "opd_tokens"),
        "rl_advantage_abs": mean("rl_advantage_abs", "rl_tokens"),
        "opd_advantage_abs": mean("opd_advantage_abs", "opd_tokens"),
        "rl_clip_fraction": mean("rl_clipped", "rl_tokens"),
        "opd_clip_fraction": mean("opd_clipped", "opd_tokens"),
        "ratio_mean": mean("ratio", "forwarded"),
        "mismatch_kl": mean("mismatch_kl", "forwarded"),
        "entropy": mean("entropy", "forwarded"),
    }
