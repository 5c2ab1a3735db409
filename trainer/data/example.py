"""A rollout as training reads it: its tokens, and the losses' inputs for each trained token."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from schemas.records import Rollout
from schemas.tensors import float32_view, int32_view, uint8_view
from trainer.advantages.rewarded_sample import AdvantageSpans
from trainer.config.loss import LossConfig
from trainer.losses.distill import distillation_advantages


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """The input of the losses, independent of the layout of the positions: m trained tokens of s sequences, in order.

    Per token [m]: `sequences`, the number of its sequence, int64; `sampler_logprobs` float32. For the RL part: `in_rl`
    (it counts), its advantage and its weight in the sum. For the OPD part: `in_opd` and its advantage. For top-K
    distillation: `teacher_ids` int64 [m, hints, k], -1 for none, and `teacher_topk` float32, their log-probs.

    Per sequence [s], int64: `groups`, equal for samples of one task; `sides`, 1 or -1 for the better and the worse
    answer of a pair, 0 for neither.

    Derived, int64: the indices of the tokens in the RL part, in the OPD part and in either. A loss selects by them,
    because a selection by a mask waits for a GPU.
    """

    sequences: Tensor
    sampler_logprobs: Tensor
    in_rl: Tensor
    rl_advantages: Tensor
    rl_weights: Tensor
    in_opd: Tensor
    opd_advantages: Tensor
    teacher_ids: Tensor
    teacher_topk: Tensor
    groups: Tensor
    sides: Tensor
    rl_indices: Tensor = field(init=False)
    opd_indices: Tensor = field(init=False)
    either_indices: Tensor = field(init=False)

    def __post_init__(self) -> None:
        masks = {"rl": self.in_rl, "opd": self.in_opd, "either": self.in_rl | self.in_opd}
        for name, mask in masks.items():
            object.__setattr__(self, f"{name}_indices", mask.nonzero().squeeze(1))

    def to(self, device: str) -> "TokenTargets":
        """Returns a copy on a device."""
        return TokenTargets(*(getattr(self, name).to(device) for name in _given_fields()))

    @classmethod
    def cat(cls, parts: Sequence["TokenTargets"]) -> "TokenTargets":
        """Concatenates several, at least one; the sequences are renumbered."""
        parts = _pad_hints(parts)
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _given_fields()}
        counts = torch.tensor([0, *(len(part.groups) for part in parts[:-1])]).cumsum(0)
        numbers = [part.sequences + first for part, first in zip(parts, counts, strict=True)]
        return cls(**(joined | {"sequences": torch.cat(numbers)}))


def _given_fields() -> list[str]:
    return [each.name for each in fields(TokenTargets) if each.init]


def _pad_hints(parts: Sequence[TokenTargets]) -> list[TokenTargets]:
    """Pads all parts to the same number of hints and of most likely tokens."""
    shapes = [part.teacher_ids.shape for part in parts]
    hints, k = max(shape[1] for shape in shapes), max(shape[2] for shape in shapes)
    if hints * k == 0:
        return list(parts)
    widened = []
    for part, shape in zip(parts, shapes, strict=True):
        padding = (0, k - shape[2], 0, hints - shape[1])
        widened.append(
            replace(
                part,
                teacher_ids=torch.nn.functional.pad(part.teacher_ids, padding, value=-1),
                teacher_topk=torch.nn.functional.pad(part.teacher_topk, padding),
            )
        )
    return widened


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One rollout: `token_ids` int64 [n], the indices of its m trained tokens int64 [m], the temperature at which they
    were sampled, and the input of the losses."""

    token_ids: Tensor
    trained_indices: Tensor
    temperature: float
    token_targets: TokenTargets

    def has_gradient(self, loss: LossConfig) -> bool:
        """True if its gradient can be nonzero."""
        targets = self.token_targets
        pulled_to_sampler = loss.kind == "masked" and loss.mask_kl > 0
        rewarded = targets.in_rl if pulled_to_sampler else targets.rl_advantages != 0
        distilled = targets.in_opd if loss.opd_kind == "topk" else targets.opd_advantages != 0
        has_advantage = (loss.rl_weight > 0 and rewarded.any()) or (loss.opd_weight > 0 and distilled.any())
        is_regularised = (loss.kl.coef > 0 or loss.entropy_coef > 0) and (targets.in_rl | targets.in_opd).any()
        return bool(has_advantage or is_regularised or (targets.sides != 0).any())


def example_of(rollout: Rollout, *, advantages: AdvantageSpans | None, opd: bool, loss: LossConfig) -> TrainingExample:
    """Returns the example of a rollout.

    `advantages`: those of its RL part, by spans of its tokens; tokens outside all spans are not in the RL part. None:
    it has no RL part. `opd`: True if its OPD part trains. Tokens with non-finite log-probs of the sampler are excluded
    from all parts, those with non-finite log-probs of the teacher from the OPD part: from the loss and from the count.
    """
    mask = torch.from_numpy(uint8_view(rollout.loss_mask).astype(np.bool_))
    sampler_logprobs = torch.from_numpy(float32_view(rollout.sampler_logprobs).copy())
    trained_indices = (mask & sampler_logprobs.isfinite()).nonzero().squeeze(1)
    sampler_logprobs = sampler_logprobs[trained_indices]
    in_rl, rl_advantages = torch.zeros(len(trained_indices), dtype=torch.bool), torch.zeros(len(trained_indices))
    for start, end, value in advantages or ():
        in_span = (trained_indices >= start) & (trained_indices < end)
        in_rl |= in_span
        # A Python number over float32's largest is refused; as a tensor it becomes infinite, and the step reports it.
        rl_advantages = torch.where(in_span, torch.tensor(value, dtype=torch.float64).float(), rl_advantages)
    in_opd, opd_advantages = torch.zeros_like(in_rl), torch.zeros_like(rl_advantages)
    teacher_ids, teacher_topk = (
        torch.zeros((len(trained_indices), 0, 0), dtype=torch.int64),
        torch.zeros((len(trained_indices), 0, 0)),
    )
    if opd and loss.opd_kind == "topk" and rollout.topk:
        shape = (-1, rollout.n_tokens, rollout.topk)
        topk_ids = torch.from_numpy(int32_view(rollout.topk_ids).astype(np.int64)).view(shape)
        topk_logprobs = torch.from_numpy(float32_view(rollout.topk_logprobs).copy()).view(shape)
        finite = topk_logprobs.isfinite()
        teacher_ids = torch.where(finite, topk_ids, -1)[:, trained_indices].transpose(0, 1)
        teacher_topk = torch.where(finite, topk_logprobs, 0.0)[:, trained_indices].transpose(0, 1)
        in_opd = (teacher_ids >= 0).flatten(1).any(1)
    elif opd and loss.opd_kind == "token" and rollout.teacher_logprobs is not None:
        teacher_logprobs = torch.from_numpy(float32_view(rollout.teacher_logprobs).copy())[trained_indices]
        in_opd = teacher_logprobs.isfinite()
        opd_advantages = torch.where(
            in_opd, distillation_advantages(teacher_logprobs, sampler_logprobs, loss.opd_clip), opd_advantages
        )
    token_targets = TokenTargets(
        sequences=torch.zeros(len(trained_indices), dtype=torch.int64),
        sampler_logprobs=sampler_logprobs,
        in_rl=in_rl,
        rl_advantages=rl_advantages,
        rl_weights=torch.full((len(trained_indices),), _rl_token_weight(int(in_rl.sum()), loss)),
        in_opd=in_opd,
        opd_advantages=opd_advantages,
        teacher_ids=teacher_ids,
        teacher_topk=teacher_topk,
        groups=torch.tensor([group_number(rollout.head.task_id)]),
        sides=torch.tensor([_pair_side(rollout, loss) if advantages is not None and len(trained_indices) else 0]),
    )
    token_ids = torch.from_numpy(int32_view(rollout.token_ids).astype(np.int64))
    return TrainingExample(token_ids, trained_indices, rollout.sampling.temperature, token_targets)


def group_number(task_id: str) -> int:
    """Returns 63 bits of sha256 of a task's id."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") >> 1


def _rl_token_weight(n_rl: int, loss: LossConfig) -> float:
    """Returns the weight of an RL token in a sequence that has n_rl of them."""
    if loss.weighting == "token_mean":
        return 1.0
    if loss.weighting == "sequence_mean":
        return 1.0 / max(1, n_rl)
    assert loss.aggregate_length is not None, "Loss validates this"
    return 1.0 / loss.aggregate_length


def _pair_side(rollout: Rollout, loss: LossConfig) -> int:
    if loss.pair.weight == 0.0 or rollout.reward is None:
        return 0
    return 1 if rollout.reward >= loss.pair.threshold else -1
