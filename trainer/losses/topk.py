"""Distillation over the likeliest tokens, with the hint chosen by overlap."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.settings import Loss, TopK
from trainer.losses.tokens import Metrics, sequence_sums

# What a distribution keeps for everything outside the support, so that its logarithm stays finite.
TAIL_FLOOR = 1e-7


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Of t tokens, under h hints (the shortest first), with a teacher that was asked for its k' likeliest tokens.

    `student_ids` int64 [t, k], likeliest first; `teacher_ids` int64 [t, h, k'] and `teacher_logprobs` float32, also
    likeliest first, id -1 where there is none; `logprobs` and `old_logprobs` float32 [t, k + h k'], the log-probs of
    cat(student_ids, teacher_ids) by the trained policy (with gradient) and by the policy before the step (without);
    `sequences` int64 [t].
    """

    student_ids: Tensor
    teacher_ids: Tensor
    teacher_logprobs: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    sequences: Tensor


def choose(of: Likeliest, options: TopK) -> tuple[Tensor, Tensor]:
    """(which hint teaches each token int64 [t], in how many of the k likeliest tokens it and the student agree [t]).

    O[h, t] = |student's k likeliest and the teacher's under hint h|: `sequence` takes the hint with the largest sum of
    O over the sequence, `token` that with the largest O at the token, `shortest` the first; of equals the shortest.
    """
    likeliest = of.teacher_ids[:, :, : options.k]
    there = (of.teacher_ids >= 0).any(2)
    same = of.student_ids[:, None, :, None] == likeliest[:, :, None, :]
    overlap = (same & (likeliest >= 0)[:, :, None, :]).any(3).sum(2)
    ranked = torch.where(there, overlap, -1)
    if options.choice == "sequence":
        columns = [sequence_sums(column.double(), of.sequences)[0][of.sequences] for column in ranked.unbind(1)]
        hint = torch.stack(columns, 1).argmax(1)
    elif options.choice == "token":
        hint = ranked.argmax(1)
    else:
        hint = there.long().argmax(1)
    return hint, overlap.gather(1, hint[:, None]).squeeze(1)


def topk_distillation(of: Likeliest, loss: Loss) -> tuple[Tensor, Metrics]:
    """Sum over tokens t and over the tokens v of the support S_t of max(-A_v rho_v, -A_v clip(rho_v)), where
    w = softmax over S_t of log pi_old, A_v = w_v clip(log pi_T(v) - log pi_old(v), +-opd_clip), rho_v = pi(v) /
    pi_old(v) (OpenClaw-RL, hybrid method; top-K and tail: arXiv 2601.19897). Denominator: the OPD tokens of the batch.

    S_t: the student's k likeliest tokens, the teacher's, or those in both; with `tail` also everything else as one
    outcome, and then w are the probabilities themselves and the gradient is that of the reverse KL between the two, as
    far as nothing is clipped. A token of the student's that the teacher did not list has at most the probability of its
    last listed token and of its tail: that bound stands for it.
    """
    options = loss.topk
    k, t = options.k, len(of.student_ids)
    hint, overlap = choose(of, options)
    rows = torch.arange(t, device=hint.device)
    listed, listed_logprobs = of.teacher_ids[rows, hint], of.teacher_logprobs[rows, hint]
    known = listed >= 0
    if options.support == "teacher":
        ids, valid = listed[:, :k], known[:, :k]
        n_listed = listed.shape[1]
        places = k + hint[:, None] * n_listed + torch.arange(ids.shape[1], device=hint.device)
    else:
        ids, valid = of.student_ids, of.student_ids >= 0
        places = torch.arange(k, device=hint.device).expand(t, k)
    matches = (ids[:, :, None] == listed[:, None, :]) & known[:, None, :]
    found = matches.any(2)
    if options.support == "overlap":
        valid = valid & (matches[:, :, :k].any(2))
    mass = torch.where(known, listed_logprobs, -torch.inf).exp().sum(1, keepdim=True)
    last = torch.where(known, listed_logprobs, torch.inf).amin(1, keepdim=True)
    bound = torch.minimum(last, _rest(mass))
    taught = torch.where(found, listed_logprobs.gather(1, matches.long().argmax(2)), bound)

    ours = torch.where(valid, of.logprobs.gather(1, places), 0.0)
    old = torch.where(valid, of.old_logprobs.gather(1, places), 0.0)
    if options.tail:
        ours, old, taught = (
            torch.cat([each, _rest((each.exp() * valid).sum(1, keepdim=True))], 1) for each in (ours, old, taught)
        )
        valid = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)
    with torch.no_grad():
        weights = torch.where(valid, old, -torch.inf).softmax(1).nan_to_num(0.0)
        advantages = weights * (taught - old).clamp(-loss.opd_clip, loss.opd_clip)
    ratio = (ours - old).clamp(-loss.log_ratio_clamp, loss.log_ratio_clamp).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - loss.clip_low, 1.0 + loss.clip_high)
    per_token = torch.where(valid, torch.maximum(free, bounded), 0.0).sum(1)
    with torch.no_grad():
        metrics = {
            "clipped": ((bounded > free) & valid).any(1).float().sum(),
            "overlap": (overlap / k).sum(),
        }
    return per_token.sum(), metrics


def _rest(mass: Tensor) -> Tensor:
    """log(1 - mass), no less than log(TAIL_FLOOR)."""
    return (1.0 - mass).clamp(min=TAIL_FLOOR).log()
