"""Contrastive losses on pairs of answers to the same task.

The first Tentalis trained with a hinge between *scores*, constants without a gradient, and called it CISPO. This module
implements the intended loss: the policy itself makes the better answer more likely. (MiniMax's CISPO is in cispo.py.)
"""

import torch
from torch import Tensor

from trainer.config.loss import PairLossConfig
from trainer.losses.tokens import sequence_sums


def contrastive(
    logprobs: Tensor, sequences: Tensor, groups: Tensor, sides: Tensor, pair: PairLossConfig
) -> tuple[Tensor, int]:
    """Returns the sum over all pairs (better, worse) within a group, and the number of pairs. Denominator: the pairs of
    the batch.

    With s the mean of a sequence's log-probs: `contrastive_pair` max(0, margin - (s_better - s_worse)), zero once the
    better one is ahead by the margin; `infonce_pair` log(1 + exp((s_worse - s_better) / temperature)), the InfoNCE loss
    (arXiv 1807.03748) of one positive and one negative.

    `logprobs` float32 [T] with gradient, `sequences` int64 [T]; per sequence number [S]: `groups` int64, equal within a
    group, `sides` int64: 1 better, -1 worse, 0 neither.

    Example: s -1 and -1.2, margin 0.5: 0.3.
    """
    if not len(logprobs):
        return logprobs.sum(), 0
    sums, counts = sequence_sums(logprobs, sequences, len(groups))
    present = counts > 0
    means = sums / counts.clamp(min=1.0)
    better = (present & (sides == 1)).nonzero().squeeze(1)
    worse = (present & (sides == -1)).nonzero().squeeze(1)
    left, right = (groups[better][:, None] == groups[worse][None, :]).nonzero(as_tuple=True)
    ahead = means[better[left]] - means[worse[right]]
    if pair.kind == "contrastive_pair":
        each = (pair.margin - ahead).clamp(min=0.0)
    else:
        each = torch.nn.functional.softplus(-ahead / pair.temperature)
    return each.sum(), len(ahead)
