"""Distillation over the most likely tokens, with the hint chosen by overlap."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.loss import LossConfig, TopKConfig
from trainer.losses.tokens import Metrics, sequence_sums

# Least probability of everything outside the support, so that its logarithm stays finite.
TAIL_FLOOR = 1e-7


@dataclass(frozen=True, slots=True)
class TopKTokens:
    """t tokens with their candidates, under h hints (the shortest first), from a teacher that was asked for its k' most
    likely tokens.

    `student_ids` int64 [t, k], most likely first; `teacher_ids` int64 [t, h, k'] and `teacher_logprobs` float32, also
    most likely first, id -1 where there is none; `logprobs` and `old_logprobs` float32 [t, k + h k'], the log-probs of
    cat(student_ids, teacher_ids) by the trained policy (with gradient) and by the policy before the step (without);
    `sequences` int64 [t], all below `n_sequences`.
    """

    student_ids: Tensor
    teacher_ids: Tensor
    teacher_logprobs: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    sequences: Tensor
    n_sequences: int


def choose_hint(tokens: TopKTokens, options: TopKConfig) -> tuple[Tensor, Tensor]:
    """Returns (index of the hint that teaches each token int64 [t], number of the k most likely tokens on which it and
    the student agree [t]).

    O[h, t] = |student's k most likely tokens and the teacher's under hint h|. `sequence` takes the hint with the
    largest sum of O over the sequence, `token` the one with the largest O at the token, `shortest` the first. Ties: the
    shortest.
    """
    likeliest = tokens.teacher_ids[:, :, : options.k]
    has_teacher = (tokens.teacher_ids >= 0).any(2)
    same = tokens.student_ids[:, None, :, None] == likeliest[:, :, None, :]
    overlap = (same & (likeliest >= 0)[:, :, None, :]).any(3).sum(2)
    ranked = torch.where(has_teacher, overlap, -1)
    if options.choice == "sequence":
        numbers, n = tokens.sequences, tokens.n_sequences
        columns = [sequence_sums(column.double(), numbers, n)[0][numbers] for column in ranked.unbind(1)]
        hint = torch.stack(columns, 1).argmax(1)
    elif options.choice == "token":
        hint = ranked.argmax(1)
    else:
        hint = has_teacher.long().argmax(1)
    return hint, overlap.gather(1, hint[:, None]).squeeze(1)


def topk_distillation(tokens: TopKTokens, loss: LossConfig) -> tuple[Tensor, Metrics]:
    """Returns the sum over tokens t and over the tokens v of the support S_t of max(-A_v rho_v, -A_v clip(rho_v)),
    where w = softmax over S_t of log pi_old, A_v = w_v clip(log pi_T(v) - log pi_old(v), +-opd_clip), rho_v = pi(v) /
    pi_old(v) (OpenClaw-RL, hybrid method; top-K and tail: arXiv 2601.19897). Denominator: the OPD tokens of the batch.

    S_t: the student's k most likely tokens, the teacher's, or those in both. With `tail` everything else is one more
    outcome; w are then the probabilities themselves, and the gradient is that of the reverse KL between the two where
    nothing is clipped. A token of the student's that the teacher did not list is given an upper bound of its
    probability: the smaller of the teacher's last listed probability and the teacher's tail.
    """
    options = loss.topk
    k, t = options.k, len(tokens.student_ids)
    hint, overlap = choose_hint(tokens, options)
    rows = torch.arange(t, device=hint.device)
    listed, listed_logprobs = tokens.teacher_ids[rows, hint], tokens.teacher_logprobs[rows, hint]
    known = listed >= 0
    if options.support == "teacher":
        ids, valid = listed[:, :k], known[:, :k]
        n_listed = listed.shape[1]
        places = k + hint[:, None] * n_listed + torch.arange(ids.shape[1], device=hint.device)
    else:
        ids, valid = tokens.student_ids, tokens.student_ids >= 0
        places = torch.arange(k, device=hint.device).expand(t, k)
    matches = (ids[:, :, None] == listed[:, None, :]) & known[:, None, :]
    found = matches.any(2)
    if options.support == "overlap":
        valid = valid & (matches[:, :, :k].any(2))
    mass = torch.where(known, listed_logprobs, -torch.inf).exp().sum(1, keepdim=True)
    last = torch.where(known, listed_logprobs, torch.inf).amin(1, keepdim=True)
    bound = torch.minimum(last, _rest(mass))
    taught = torch.where(found, listed_logprobs.gather(1, matches.long().argmax(2)), bound)

    ours = torch.where(valid, tokens.logprobs.gather(1, places), 0.0)
    old = torch.where(valid, tokens.old_logprobs.gather(1, places), 0.0)
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
    """Returns log(1 - mass), at least log(TAIL_FLOOR)."""
    return (1.0 - mass).clamp(min=TAIL_FLOOR).log()
