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

from trainer.example import Example, Signal
from trainer.logprobs import TokenScores
from trainer.losses.clipped import clipped
from trainer.losses.entropy import entropy_bonus
from trainer.losses.kl import kl
from trainer.losses.pair import contrastive
from trainer.losses.registry import POLICY_LOSSES
from trainer.losses.settings import Loss
from trainer.losses.tokens import Tokens
from trainer.losses.topk import Likeliest, topk_distillation

SUMMED = (
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
"""Sums over tokens (over pairs: pair_loss) that a micro-batch contributes to the step's metrics."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators, of some rollouts or of the whole batch. `tokens`: of either part."""

    rl: float = 0.0
    opd: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0

    @classmethod
    def of(cls, micro_batches: Sequence[Sequence[Example]], loss: Loss) -> "Counts":
        """Before the first micro-batch: what a rank contributes."""
        signals = [example.signal for batch in micro_batches for example in batch]
        by_token = loss.weighting == "token_mean"
        return cls(
            rl=float(sum(int(s.in_rl.sum()) if by_token else int(s.in_rl.any()) for s in signals)),
            opd=float(sum(int(s.in_opd.sum()) for s in signals)),
            tokens=float(sum(int((s.in_rl | s.in_opd).sum()) for s in signals)),
            pairs=float(sum(map(_pairs, micro_batches))) if loss.pair.weight > 0 else 0.0,
        )


def _pairs(batch: Sequence[Example]) -> int:
    sides: dict[int, list[int]] = {}
    for example in batch:
        sides.setdefault(int(example.signal.groups), []).append(int(example.signal.sides))
    return sum(each.count(1) * each.count(-1) for each in sides.values())


def objective(
    scores: TokenScores, signal: Signal, loss: Loss, counts: Counts, base_logprobs: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the batch's loss, and the sums (SUMMED) for its metrics, detached.

    `scores` of the m tokens with gradient (of the entropies only where entropy_coef asks for it), `signal` of the same
    tokens, `counts` of the whole batch; `base_logprobs` float32 [m] where kl.against is base.
    """
    logprobs, entropies = scores.logprobs, scores.entropies
    total = logprobs.sum() * 0.0
    sums = {name: torch.zeros((), device=logprobs.device) for name in SUMMED}

    def tokens(chosen: Tensor, advantages: Tensor, weights: Tensor) -> Tokens:
        return Tokens(
            logprobs[chosen],
            signal.sampler_logprobs[chosen],
            advantages[chosen],
            weights[chosen],
            signal.sequences[chosen],
        )

    if loss.rl_weight > 0 and bool(signal.in_rl.any()):
        value, metrics = POLICY_LOSSES[loss.kind](tokens(signal.in_rl, signal.rl_advantages, signal.rl_weights), loss)
        total = total + value * (loss.rl_weight / counts.rl)
        sums["rl_loss"], sums["rl_clipped"] = value.detach(), metrics["clipped"]
    if loss.opd_weight > 0 and bool(signal.in_opd.any()):
        if loss.opd_kind == "topk":
            value, metrics = topk_distillation(_likeliest(scores, signal), loss)
            sums["overlap"] = metrics["overlap"]
        else:
            each = torch.ones_like(logprobs)
            value, metrics = clipped(tokens(signal.in_opd, signal.opd_advantages, each), loss)
        total = total + value * (loss.opd_weight / counts.opd)
        sums["opd_loss"], sums["opd_clipped"] = value.detach(), metrics["clipped"]
    held = signal.in_rl | signal.in_opd
    if loss.kl.coef > 0 and bool(held.any()):
        reference = signal.sampler_logprobs if base_logprobs is None else base_logprobs
        value = kl(loss.kl.kind, logprobs[held], reference[held], loss.log_ratio_clamp).sum()
        total = total + value * (loss.kl.coef / counts.tokens)
        sums["kl_loss"] = value.detach()
    if loss.entropy_coef > 0 and bool(held.any()):
        total = total + entropy_bonus(entropies[held]) * (loss.entropy_coef / counts.tokens)
    if loss.pair.weight > 0:
        value, n_pairs = contrastive(logprobs, signal.sequences, signal.groups, signal.sides, loss.pair)
        if n_pairs:
            total = total + value * (loss.pair.weight / counts.pairs)
            sums["pair_loss"] = value.detach()
    return total, sums | _mismatch(logprobs.detach(), entropies.detach(), signal, loss)


def _likeliest(scores: TokenScores, signal: Signal) -> Likeliest:
    """A batch is used for one step: the policy before the step is the policy itself."""
    assert scores.candidates is not None and scores.likeliest is not None, "asked for with the forward pass"
    here = signal.in_opd
    return Likeliest(
        scores.likeliest[here],
        signal.teacher_ids[here],
        signal.teacher_topk[here],
        scores.candidates[here],
        scores.candidates[here].detach(),
        signal.sequences[here],
    )


def _mismatch(logprobs: Tensor, entropies: Tensor, signal: Signal, loss: Loss) -> dict[str, Tensor]:
    """How far the policy is from the sampler, over all tokens that went through the model."""
    log_ratio = (logprobs - signal.sampler_logprobs).clamp(-loss.log_ratio_clamp, loss.log_ratio_clamp)
    ratio = log_ratio.exp()
    return {
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "logprob_gap": log_ratio.abs().sum(),
        # k3 of KL(mu || pi), from samples of mu: never negative.
        "mismatch_kl": (ratio - 1.0 - log_ratio).sum(),
        "entropy": entropies.sum(),
        "forwarded": ratio.new_tensor(float(len(ratio))),
    }


def counts_from(values: dict[str, float]) -> Counts:
    """The counts of the whole batch from the sums over ranks, named n_rl, n_opd and so on."""
    return Counts(**{field.name: values[f"n_{field.name}"] for field in fields(Counts)})
