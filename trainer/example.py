"""A rollout as training reads it: its tokens, and what the losses need to know of each that trains."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from schemas.records import Rollout
from schemas.tensors import float32_view, int32_view, uint8_view
from trainer.advantages.graded import Spans
from trainer.losses.distill import distillation_advantages
from trainer.losses.settings import Loss


@dataclass(frozen=True, slots=True)
class Signal:
    """What the losses read, whatever the layout of the positions: m trained tokens of s sequences, in order.

    Per token [m]: `sequences`, the number of its sequence, int64; `sampler_logprobs` float32; for the RL part whether
    it counts (`in_rl`), its advantage and its weight in the sum; for the OPD part whether it counts and its advantage.
    Where distillation goes over likeliest tokens: `teacher_ids` int64 [m, hints, k], -1 for none, and
    `teacher_topk` float32, their log-probs.
    Per sequence [s], int64: `groups`, equal for samples of one task; `sides`, 1 or -1 for the better and the worse
    answer of a pair, 0 for neither.
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

    def to(self, device: str) -> "Signal":
        """The same on a device."""
        return Signal(*(getattr(self, field.name).to(device) for field in fields(self)))

    @classmethod
    def cat(cls, parts: Sequence["Signal"]) -> "Signal":
        """Of several, at least one, one after the other; the sequences are numbered anew."""
        parts = _widened(parts)
        joined = {field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        counts = torch.tensor([0, *(len(part.groups) for part in parts[:-1])]).cumsum(0)
        numbers = [part.sequences + first for part, first in zip(parts, counts, strict=True)]
        return cls(**(joined | {"sequences": torch.cat(numbers)}))


def _widened(parts: Sequence[Signal]) -> list[Signal]:
    """With room for equally many hints and likeliest tokens."""
    shapes = [part.teacher_ids.shape for part in parts]
    hints, k = max(shape[1] for shape in shapes), max(shape[2] for shape in shapes)
    if hints * k == 0:
        return list(parts)
    widened = []
    for part, shape in zip(parts, shapes, strict=True):
        room = (0, k - shape[2], 0, hints - shape[1])
        widened.append(
            replace(
                part,
                teacher_ids=torch.nn.functional.pad(part.teacher_ids, room, value=-1),
                teacher_topk=torch.nn.functional.pad(part.teacher_topk, room),
            )
        )
    return widened


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout: `token_ids` int64 [n], the indices of its m trained tokens int64 [m], the temperature at which they
    were sampled, and their signal."""

    token_ids: Tensor
    index: Tensor
    temperature: float
    signal: Signal

    def trains(self, loss: Loss) -> bool:
        """Whether its gradient can be anything but zero."""
        signal = self.signal
        pulled = loss.kind == "masked" and loss.mask_kl > 0
        rewarded = signal.in_rl if pulled else signal.rl_advantages != 0
        taught = signal.in_opd if loss.opd_kind == "topk" else signal.opd_advantages != 0
        moved = (loss.rl_weight > 0 and rewarded.any()) or (loss.opd_weight > 0 and taught.any())
        held = (loss.kl.coef > 0 or loss.entropy_coef > 0) and (signal.in_rl | signal.in_opd).any()
        return bool(moved or held or (signal.sides != 0).any())


def example_of(rollout: Rollout, *, advantages: Spans | None, opd: bool, loss: Loss) -> Example:
    """The example of a rollout.

    `advantages`: those of its RL part, by spans of its tokens; what no span covers is not in the RL part. None: it has
    none. `opd`: whether its OPD part trains. Tokens with non-finite log-probs of the sampler are left out of all parts,
    those with non-finite log-probs of the teacher out of the OPD part: of the loss and of the count.
    """
    mask = torch.from_numpy(uint8_view(rollout.loss_mask).astype(np.bool_))
    sampler = torch.from_numpy(float32_view(rollout.sampler_logprobs).copy())
    index = (mask & sampler.isfinite()).nonzero().squeeze(1)
    sampler = sampler[index]
    in_rl, rl_advantages = torch.zeros(len(index), dtype=torch.bool), torch.zeros(len(index))
    for start, end, value in advantages or ():
        covered = (index >= start) & (index < end)
        in_rl |= covered
        rl_advantages = torch.where(covered, value, rl_advantages)
    in_opd, opd_advantages = torch.zeros_like(in_rl), torch.zeros_like(rl_advantages)
    teacher_ids, teacher_topk = torch.zeros((len(index), 0, 0), dtype=torch.int64), torch.zeros((len(index), 0, 0))
    if opd and loss.opd_kind == "topk" and rollout.topk:
        shape = (-1, rollout.n_tokens, rollout.topk)
        ids = torch.from_numpy(int32_view(rollout.topk_ids).astype(np.int64)).view(shape)
        listed = torch.from_numpy(float32_view(rollout.topk_logprobs).copy()).view(shape)
        finite = listed.isfinite()
        teacher_ids = torch.where(finite, ids, -1)[:, index].transpose(0, 1)
        teacher_topk = torch.where(finite, listed, 0.0)[:, index].transpose(0, 1)
        in_opd = (teacher_ids >= 0).flatten(1).any(1)
    elif opd and loss.opd_kind == "token" and rollout.teacher_logprobs is not None:
        teacher = torch.from_numpy(float32_view(rollout.teacher_logprobs).copy())[index]
        in_opd = teacher.isfinite()
        opd_advantages = torch.where(in_opd, distillation_advantages(teacher, sampler, loss.opd_clip), opd_advantages)
    signal = Signal(
        sequences=torch.zeros(len(index), dtype=torch.int64),
        sampler_logprobs=sampler,
        in_rl=in_rl,
        rl_advantages=rl_advantages,
        rl_weights=torch.full((len(index),), _weight(int(in_rl.sum()), loss)),
        in_opd=in_opd,
        opd_advantages=opd_advantages,
        teacher_ids=teacher_ids,
        teacher_topk=teacher_topk,
        groups=torch.tensor([group_number(rollout.head.task_id)]),
        sides=torch.tensor([_side(rollout, loss) if advantages is not None and len(index) else 0]),
    )
    tokens = torch.from_numpy(int32_view(rollout.token_ids).astype(np.int64))
    return Example(tokens, index, rollout.sampling.temperature, signal)


def group_number(task_id: str) -> int:
    """63 bits of sha256 of a task's id."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") >> 1


def _weight(n_rl: int, loss: Loss) -> float:
    """Of an RL token of a sequence that has n_rl of them."""
    if loss.weighting == "token_mean":
        return 1.0
    if loss.weighting == "sequence_mean":
        return 1.0 / max(1, n_rl)
    assert loss.aggregate_length is not None, "the settings see to it"
    return 1.0 / loss.aggregate_length


def _side(rollout: Rollout, loss: Loss) -> int:
    if loss.pair.weight == 0.0 or rollout.reward is None:
        return 0
    return 1 if rollout.reward >= loss.pair.threshold else -1
