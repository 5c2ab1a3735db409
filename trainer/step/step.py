"""One training step on the rollouts of this rank's micro-batches. Live training and replay both use it."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from schemas.records import BatchPlan, PlanRow, Rollout
from trainer.advantages.batch import BatchAdvantages, estimate_advantages
from trainer.advantages.rewarded_sample import rewarded_sample
from trainer.config.loss import LossConfig
from trainer.data import batch_stats
from trainer.data.example import TrainingExample, example_of
from trainer.data.pack import PackedBatch, pack_examples
from trainer.distributed.ranks import RankGroup
from trainer.distributed.stop import StopRequest
from trainer.model.flops import packed_flops
from trainer.step.engine import StepNotFinite, TrainingEngine
from trainer.step.objective import SUM_NAMES, LossCounts, counts_from, objective

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Metrics and phases (seconds) of a step, for its StepResult."""

    metrics: dict[str, float]
    seconds: dict[str, float]


def train_step(
    engine: TrainingEngine,
    plan: BatchPlan,
    version: int,
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    stop: StopRequest,
) -> StepOutput:
    """Executes a plan on `version`. `rollouts`: this rank's, by key. Every rank calls it with the same plan; inside it
    a rank waits only for other ranks. Raises StepNotFinite or StopRequested; the adapter is then
    unchanged."""
    accumulated = accumulate(engine, plan, version, rollouts, loss, rank_group, stop)
    stop.check()
    started_at = time.perf_counter()
    wrong = sorted(name for name, value in accumulated.metrics.items() if not math.isfinite(value))
    optimizer_metrics = engine.step(plan.step, update=not wrong)
    if wrong:
        raise StepNotFinite(
            f"metrics of step {plan.step} are not finite: {', '.join(wrong)}; the adapter was not updated"
        )
    if accumulated.metrics["trained_rollouts"] == 0:
        reason = "equal rewards, no hints, or a weight of 0"
        log.warning("step %d: no rollout has an advantage (%s); it trains nothing", plan.step, reason)
    return StepOutput(
        accumulated.metrics | optimizer_metrics,
        accumulated.seconds | {"optimizer": time.perf_counter() - started_at},
    )


def is_finite(
    engine: TrainingEngine,
    plan: BatchPlan,
    version: int,
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    stop: StopRequest,
) -> bool:
    """True if the metrics and the gradient of a plan are finite. Computes them and discards them. A collective."""
    accumulated = accumulate(engine, plan, version, rollouts, loss, rank_group, stop)
    try:
        engine.step(plan.step, update=False)
    except StepNotFinite:
        return False
    return all(map(math.isfinite, accumulated.metrics.values()))


def accumulate(
    engine: TrainingEngine,
    plan: BatchPlan,
    version: int,
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    stop: StopRequest,
) -> StepOutput:
    """Computes the gradient of a plan and its metrics, equal on all ranks. A collective."""
    started_at = time.perf_counter()
    torch.manual_seed(plan.seed)
    rows = [row for row in plan.rows if row.rank == rank_group.rank]
    baseline = None if loss.baseline_decay is None else plan.baseline
    advantages, examples = build_examples(rows, rollouts, loss, rank_group, baseline)
    statistics = _row_statistics(rows, rollouts, examples, version, loss)
    # The denominators are fixed over all ranks before the first micro-batch.
    totals = dict(
        zip(
            statistics,
            rank_group.sum(torch.tensor(list(statistics.values()), dtype=torch.float64)).tolist(),
            strict=True,
        )
    )
    counts = counts_from(totals)
    micro_batches = [batch.to(engine.device) for batch in pack_micro_batches(examples, loss)]
    packed_at = time.perf_counter()
    parts = run_micro_batches(engine, micro_batches, loss, counts, stop)
    if not micro_batches:
        engine.backward(engine.zero_loss())
    sums = torch.zeros(len(SUM_NAMES) + 2, dtype=torch.float64)
    # Only now: a copy from a GPU waits for everything that was started there.
    for part in parts:
        sums[:-2] += part.cpu().double()
    shape = engine.policy.shape()
    positions = sum(len(batch.input_ids) for batch in micro_batches)
    flops = sum(packed_flops(batch.spans, len(batch.targets), shape) for batch in micro_batches)
    sums[-2], sums[-1] = positions, flops
    totals |= dict(zip((*SUM_NAMES, "positions", "model_flops"), rank_group.sum(sums).tolist(), strict=True))
    return StepOutput(
        _step_metrics(totals) | advantages.metrics,
        {"pack": packed_at - started_at, "forward_backward": time.perf_counter() - packed_at},
    )


def run_micro_batches(
    engine: TrainingEngine,
    micro_batches: Sequence[PackedBatch],
    loss: LossConfig,
    counts: LossCounts,
    stop: StopRequest,
) -> list[torch.Tensor]:
    """Adds the gradient of each micro-batch to the engine's; returns the sums (SUM_NAMES) of each, where they were
    computed. Waits nowhere for a GPU (a loss on pairs does), so that it has the next micro-batch when it ends one.

    `micro_batches` are on the engine's device; `counts` are those of the whole batch. Raises StopRequested."""
    parts = []
    for batch in micro_batches:
        stop.check()
        base_logprobs = engine.policy.base_logprobs(batch) if loss.kl.coef > 0 and loss.kl.against == "base" else None
        n_likeliest = loss.topk.k if loss.opd_kind == "topk" and loss.opd_weight > 0 else 0
        scores = engine.forward(batch, loss.entropy_coef > 0, n_likeliest)
        total, batch_sums = objective(scores, batch.token_targets, loss, counts, base_logprobs)
        engine.backward(total)
        parts.append(torch.stack([batch_sums[name] for name in SUM_NAMES]))
    return parts


def build_examples(
    rows: Sequence[PlanRow],
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    baseline: float | None = None,
) -> tuple[BatchAdvantages, list[list[TrainingExample]]]:
    """Returns the advantages of the batch, and this rank's examples by micro-batch, both in the plan's order. A
    collective."""
    advantages = batch_advantages(rows, rollouts, loss, rank_group, baseline)
    examples = {
        row.rollout_id: example_of(
            rollouts[row.rollout_id], advantages=advantages.by_rollout.get(row.rollout_id), opd=row.opd, loss=loss
        )
        for row in rows
    }
    return advantages, [[examples[key] for key in keys] for keys in _micro_batches(rows)]


def pack_micro_batches(micro_batches: Iterable[Sequence[TrainingExample]], loss: LossConfig) -> list[PackedBatch]:
    """Packs the micro-batches in the plan's order, without examples that train nothing; skips empty micro-batches."""
    trained = ([example for example in batch if example.has_gradient(loss)] for batch in micro_batches)
    return [pack_examples(batch) for batch in trained if batch]


def batch_advantages(
    rows: Sequence[PlanRow],
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    baseline: float | None = None,
) -> BatchAdvantages:
    """Returns the advantages of the whole batch, the same on every rank. `rows` and `rollouts` are this rank's. A
    collective: groups and sessions may be spread over several ranks."""
    own_samples = [
        sample for row in rows if row.rl and (sample := rewarded_sample(rollouts[row.rollout_id])) is not None
    ]
    samples = [sample for gathered in rank_group.gather(own_samples) for sample in gathered]
    return estimate_advantages(samples, loss, baseline)


def _micro_batches(rows: Iterable[PlanRow]) -> list[list[str]]:
    """Returns the keys of each micro-batch, both in the plan's order."""
    batches: dict[int, list[str]] = {}
    for row in rows:
        batches.setdefault(row.micro_batch, []).append(row.rollout_id)
    return [batches[number] for number in sorted(batches)]


def _row_statistics(
    rows: Sequence[PlanRow],
    rollouts: Mapping[str, Rollout],
    micro_batches: Sequence[Sequence[TrainingExample]],
    version: int,
    loss: LossConfig,
) -> dict[str, float]:
    """Returns statistics of this rank's rows that are known before the forward pass, as sums over rows."""
    rewards = [r for row in rows if row.rl and (r := rollouts[row.rollout_id].reward) is not None]
    staleness = [version - batch_stats.oldest_version(rollouts[row.rollout_id]) for row in rows]
    targets = [example.token_targets for batch in micro_batches for example in batch]
    return {
        "rollouts": float(len(rows)),
        "trained_rollouts": float(sum(example.has_gradient(loss) for batch in micro_batches for example in batch)),
        "tokens": float(sum(row.n_tokens for row in rows)),
        "rl_tokens": float(sum(int(target.in_rl.sum()) for target in targets)),
        "rl_advantage_abs": sum(float(target.rl_advantages.abs().sum()) for target in targets),
        "opd_advantage_abs": sum(float(target.opd_advantages.abs().sum()) for target in targets),
        "rewarded": float(len(rewards)),
        "reward": sum(rewards),
        "reward_squared": sum(reward * reward for reward in rewards),
        "staleness": float(sum(staleness)),
        **batch_stats.count_rollouts([rollouts[row.rollout_id] for row in rows], version),
    } | {f"n_{name}": count for name, count in asdict(LossCounts.of(micro_batches, loss)).items()}


def _step_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    def mean(name: str, count: str) -> float:
        return totals[name] / totals[count] if totals[count] else 0.0

    reward_mean = mean("reward", "rewarded")
    counts = ("rollouts", "trained_rollouts", "tokens", "rl_tokens", "positions", "model_flops")
    return {name: totals[name] for name in counts} | {
        **batch_stats.metrics(totals),
        "opd_tokens": totals["n_opd"],
        "pairs": totals["n_pairs"],
        "reward_mean": reward_mean,
        "reward_std": math.sqrt(max(0.0, mean("reward_squared", "rewarded") - reward_mean * reward_mean)),
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
        if totals["forwarded"] and totals["ratio_squared"]
        else 0.0,
        "entropy": mean("entropy", "forwarded"),
    }
