"""Micro-batches: rollouts to one flat sequence without padding, shared prompts once, and no attention across samples.

A rollout splits into its prompt (everything before its first trained token) and the rest. Rollouts of one micro-batch
with the same prompt share its positions: the tokens of a group of eight are computed once for the prompt and eight
times for the answers. `Layout` tells the attention which positions belong together; positions count from the prompt on,
so every log-prob is the one that the rollout alone would give.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.records import Rollout
from schemas.tensors import float32_view, int32_view, uint8_view
from trainer.advantage import Estimator, advantage
from trainer.loss import distillation_advantages


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout as training reads it: token ids int64 [n], and per trained token (m of them) its index in the
    rollout, the sampler's log-prob, and for both parts whether it counts and its advantage."""

    token_ids: Tensor
    index: Tensor
    sampler_logprobs: Tensor
    temperature: float
    in_rl: Tensor
    rl_advantages: Tensor
    in_opd: Tensor
    opd_advantages: Tensor
    candidates: Tensor | None = None
    """Ids whose log-probs the loss needs beside that of the token itself, int64 [m, k], -1 for none."""

    @property
    def trains(self) -> bool:
        """Whether any token has an advantage: if none has, the gradient of this rollout is exactly zero."""
        return bool((self.rl_advantages != 0).any() or (self.opd_advantages != 0).any())


def example_of(rollout: Rollout, *, rl: bool, opd: bool, estimator: Estimator, opd_clip: float) -> Example:
    """The example of a rollout of which the named parts train. Tokens with non-finite log-probs of the sampler are left
    out of both parts, those with non-finite log-probs of the teacher out of the OPD part: of the loss and of the count.
    """
    mask = torch.from_numpy(uint8_view(rollout.loss_mask).astype(np.bool_))
    sampler = torch.from_numpy(float32_view(rollout.sampler_logprobs).copy())
    index = (mask & sampler.isfinite()).nonzero().squeeze(1)
    sampler = sampler[index]
    zeros = torch.zeros(len(index))
    in_rl, rl_advantages = torch.zeros(len(index), dtype=torch.bool), zeros
    if rl and rollout.reward is not None:
        value = advantage(
            rollout.reward,
            rollout.n_requested,
            rollout.n_closed,
            rollout.group_mean,
            rollout.group_std,
            estimator,
        )
        if value is not None:
            in_rl, rl_advantages = torch.ones_like(in_rl), torch.full_like(zeros, value)
    in_opd, opd_advantages = torch.zeros_like(in_rl), zeros
    if opd and rollout.teacher_logprobs is not None:
        teacher = torch.from_numpy(float32_view(rollout.teacher_logprobs).copy())[index]
        in_opd = teacher.isfinite()
        opd_advantages = torch.where(in_opd, distillation_advantages(teacher, sampler, opd_clip), zeros)
    tokens = torch.from_numpy(int32_view(rollout.token_ids).astype(np.int64))
    return Example(tokens, index, sampler, rollout.sampling.temperature, in_rl, rl_advantages, in_opd, opd_advantages)


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of the packed sequence. They attend to one another causally, and to the whole of the
    prompt [prefix_start, prefix_end), which is empty for a prompt itself."""

    start: int
    end: int
    prefix_start: int
    prefix_end: int


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch of T positions and m trained tokens.

    `input_ids`, `position_ids` int64 [T]; `spans` cover [0, T) in order. Per trained token, [m]: `source`, the position
    whose output predicts it; `sample`, the rollout it belongs to, counted from 0 in the pack's order; `targets`, its
    id; and the fields of Example. `candidates` is int64 [m, k] with the widest k of the examples, or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    spans: tuple[Span, ...]
    source: Tensor
    sample: Tensor
    targets: Tensor
    temperatures: Tensor
    sampler_logprobs: Tensor
    in_rl: Tensor
    rl_advantages: Tensor
    in_opd: Tensor
    opd_advantages: Tensor
    candidates: Tensor | None

    def to(self, device: str) -> "Pack":
        """The same with its tensors on a device."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def pack(examples: Sequence[Example]) -> Pack:
    """Packs rollouts, at least one, each with at least one trained token. Rollouts with equal prompts share them."""
    prompts: dict[bytes, Span] = {}
    spans: list[Span] = []
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    sources: list[Tensor] = []
    end = 0
    for example in examples:
        # The prompt's last token predicts the first trained one, so it belongs to the prompt.
        split = int(example.index[0])
        prompt = example.token_ids[:split]
        name = prompt.numpy().tobytes()
        if name not in prompts:
            prompts[name] = Span(end, end + split, end, end)
            spans.append(prompts[name])
            ids.append(prompt)
            positions.append(torch.arange(split))
            end += split
        shared = prompts[name]
        # The last trained token and what follows it predict nothing that counts.
        rest = example.token_ids[split : int(example.index[-1])]
        if len(rest):
            spans.append(Span(end, end + len(rest), shared.start, shared.end))
            ids.append(rest)
            positions.append(torch.arange(split, split + len(rest)))
        before = example.index - 1
        sources.append(torch.where(before < split, shared.start + before, end + before - split))
        end += len(rest)
    return Pack(
        input_ids=torch.cat(ids),
        position_ids=torch.cat(positions),
        spans=tuple(spans),
        source=torch.cat(sources),
        sample=torch.repeat_interleave(torch.tensor([len(example.index) for example in examples])),
        targets=torch.cat([example.token_ids[example.index] for example in examples]),
        temperatures=torch.cat([torch.full((len(e.index),), e.temperature) for e in examples]),
        sampler_logprobs=torch.cat([example.sampler_logprobs for example in examples]),
        in_rl=torch.cat([example.in_rl for example in examples]),
        rl_advantages=torch.cat([example.rl_advantages for example in examples]),
        in_opd=torch.cat([example.in_opd for example in examples]),
        opd_advantages=torch.cat([example.opd_advantages for example in examples]),
        candidates=_candidates(examples),
    )


def _candidates(examples: Sequence[Example]) -> Tensor | None:
    width = max((e.candidates.shape[1] for e in examples if e.candidates is not None), default=0)
    if width == 0:
        return None
    rows = [torch.full((len(example.index), width), -1) for example in examples]
    for row, example in zip(rows, examples, strict=True):
        if example.candidates is not None:
            row[:, : example.candidates.shape[1]] = example.candidates
    return torch.cat(rows)
