"""The loss of a micro-batch: its parts, each weighted and divided by its own count over the whole batch.

    loss = rl_weight RL / N_rl + opd_weight OPD / N_opd
         + kl.coef KL / N + entropy_coef (-H) / N + pair.weight PAIR / N_pairs

N_rl: the weights of the RL tokens (`token_mean`: their number; otherwise the number of answers), N_opd: the OPD tokens,
N: tokens of either part, N_pairs: pairs. A part with weight 0 is not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.data.example import TokenTargets, TrainingExample
from trainer.losses.clipped import clipped
from trainer.losses.entropy import entropy_bonus
from trainer.losses.kl import kl
from trainer.losses.pair import contrastive
from trainer.losses.registry import POLICY_LOSSES
from trainer.losses.tokens import LossTokens
from trainer.losses.topk import TopKTokens, topk_distillation
from trainer.model.logprobs import TokenScores

SUM_NAMES = (
    "rl_loss",
    "opd_loss",
    "kl_loss",
    "pair_loss",
    "overlap",
    "rl_clipped",
    "opd_clipped",
    "ratio",
    "ratio_squared",
    "logprob_gap",
    "mismatch_kl",
    "entropy",
    "forwarded",
)
"""Sums over tokens (pair_loss: over pairs) that a micro-batch contributes to the step's metrics."""


@dataclass(frozen=True, slots=True)
class LossCounts:
    """The denominators, of some rollouts or of the whole batch. `tokens`: tokens of either part."""

    rl: float = 0.0
    opd: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0

    @classmethod
    def of(cls, micro_batches: Sequence[Sequence[TrainingExample]], loss: LossConfig) -> "LossCounts":
        """Returns a rank's contribution, before the first micro-batch."""
        targets = [example.token_targets for batch in micro_batches for example in batch]
        counts_tokens = loss.weighting == "token_mean"
        return cls(
            rl=float(sum(int(t.in_rl.sum()) if counts_tokens else int(t.in_rl.any()) for t in targets)),
            opd=float(sum(int(t.in_opd.sum()) for t in targets)),
            tokens=float(sum(int((t.in_rl | t.in_opd).sum()) for t in targets)),
            pairs=float(sum(map(_count_pairs, micro_batches))) if loss.pair.weight > 0 else 0.0,
        )


def _count_pairs(batch: Sequence[TrainingExample]) -> int:
    sides: dict[int, list[int]] = {}
    for example in batch:
        sides.setdefault(int(example.token_targets.groups), []).append(int(example.token_targets.sides))
    return sum(group_sides.count(1) * group_sides.count(-1) for group_sides in sides.values())


def objective(
    scores: TokenScores,
    targets: TokenTargets,
    loss: LossConfig,
    counts: LossCounts,
    base_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the micro-batch's share of the batch's loss, and the sums (SUM_NAMES) for its metrics, detached. Reads
    nothing back from a GPU, except for a loss on pairs.

    `scores` of the m tokens, with gradient (of the entropies only if entropy_coef > 0); `targets` of the same tokens;
    `counts` of the whole batch; `base_logprobs` float32 [m] if kl.against is base.
    """
    logprobs, entropies = scores.logprobs, scores.entropies
    total = logprobs.sum() * 0.0
    sums = {name: torch.zeros((), device=logprobs.device) for name in SUM_NAMES}

    def select(indices: Tensor, advantages: Tensor, weights: Tensor) -> LossTokens:
        return LossTokens(
            logprobs[indices],
            targets.sampler_logprobs[indices],
            advantages[indices],
            weights[indices],
            targets.sequences[indices],
            len(targets.groups),
        )

    if loss.rl_weight > 0 and len(targets.rl_indices):
        part_loss, metrics = POLICY_LOSSES[loss.kind](
            select(targets.rl_indices, targets.rl_advantages, targets.rl_weights), loss
        )
        total = total + part_loss * (loss.rl_weight / counts.rl)
        sums["rl_loss"], sums["rl_clipped"] = part_loss.detach(), metrics["clipped"]
    if loss.opd_weight > 0 and len(targets.opd_indices):
        if loss.opd_kind == "topk":
            part_loss, metrics = topk_distillation(_topk_tokens(scores, targets), loss)
            sums["overlap"] = metrics["overlap"]
        else:
            ones = torch.ones_like(logprobs)
            part_loss, metrics = clipped(select(targets.opd_indices, targets.opd_advantages, ones), loss)
        total = total + part_loss * (loss.opd_weight / counts.opd)
        sums["opd_loss"], sums["opd_clipped"] = part_loss.detach(), metrics["clipped"]
    in_either = targets.either_indices
    if loss.kl.coef > 0 and len(in_either):
        reference = targets.sampler_logprobs if base_logprobs is None else base_logprobs
        part_loss = kl(loss.kl.kind, logprobs[in_either], reference[in_either], loss.log_ratio_clamp).sum()
        total = total + part_loss * (loss.kl.coef / counts.tokens)
        sums["kl_loss"] = part_loss.detach()
    if loss.entropy_coef > 0 and len(in_either):
        total = total + entropy_bonus(entropies[in_either]) * (loss.entropy_coef / counts.tokens)
    if loss.pair.weight > 0:
        part_loss, n_pairs = contrastive(logprobs, targets.sequences, targets.groups, targets.sides, loss.pair)
        if n_pairs:
            total = total + part_loss * (loss.pair.weight / counts.pairs)
            sums["pair_loss"] = part_loss.detach()
    return total, sums | _mismatch(logprobs.detach(), entropies.detach(), targets, loss)


def _topk_tokens(scores: TokenScores, targets: TokenTargets) -> TopKTokens:
    """Returns the input of top-K distillation. A batch is used for one step, so the policy before the step is the
    policy itself."""
    assert scores.candidates is not None and scores.likeliest is not None, (
        "top-K distillation needs a forward pass with likeliest > 0"
    )
    in_opd = targets.opd_indices
    return TopKTokens(
        scores.likeliest[in_opd],
        targets.teacher_ids[in_opd],
        targets.teacher_topk[in_opd],
        scores.candidates[in_opd],
        scores.candidates[in_opd].detach(),
        targets.sequences[in_opd],
        len(targets.groups),
    )


def _mismatch(logprobs: Tensor, entropies: Tensor, targets: TokenTargets, loss: LossConfig) -> dict[str, Tensor]:
    """Measures the mismatch between policy and sampler, over all tokens that went through the model."""
    log_ratio = (logprobs - targets.sampler_logprobs).clamp(-loss.log_ratio_clamp, loss.log_ratio_clamp)
    ratio = log_ratio.exp()
    return {
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "logprob_gap": log_ratio.abs().sum(),
        # k3 of KL(mu || pi), from samples of mu: never negative.
        "mismatch_kl": (ratio - 1.0 - log_ratio).sum(),
        "entropy": entropies.sum(),
        # new_tensor copies from the CPU, which waits for a GPU.
        "forwarded": ratio.new_full((), float(len(ratio))),
    }


def counts_from(sums: dict[str, float]) -> LossCounts:
    """Returns the counts of the whole batch from the sums over ranks, named n_rl, n_opd and so on."""
    return LossCounts(**{field.name: sums[f"n_{field.name}"] for field in fields(LossCounts)})
