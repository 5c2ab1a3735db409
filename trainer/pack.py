"""Micro-batches: rollouts to one flat sequence without padding, shared prompts once, and no attention across samples.

A rollout splits into its prompt (everything before its first trained token) and the rest. Rollouts of one micro-batch
with the same prompt share its positions: the tokens of a group of eight are computed once for the prompt and eight
times for the answers. `Layout` tells the attention which positions belong together; positions count from the prompt on,
so every log-prob is the one that the rollout alone would give.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.example import Example, Signal


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
    whose output predicts it; `targets`, its id; its temperature; and `signal`, what the losses read.
    """

    input_ids: Tensor
    position_ids: Tensor
    spans: tuple[Span, ...]
    source: Tensor
    targets: Tensor
    temperatures: Tensor
    signal: Signal

    def to(self, device: str) -> "Pack":
        """The same with its tensors on a device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return Pack(spans=self.spans, signal=self.signal.to(device), **moved)


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
        targets=torch.cat([example.token_ids[example.index] for example in examples]),
        temperatures=torch.cat([torch.full((len(e.index),), e.temperature) for e in examples]),
        signal=Signal.cat([example.signal for example in examples]),
    )
