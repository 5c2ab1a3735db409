"""Micro-batches: packs rollouts into one flat sequence without padding. Prompts are shared; samples do not attend to
each other.

A rollout splits into its prompt (everything before its first trained token) and the rest. Rollouts of one micro-batch
with the same prompt share its positions: for a group of eight the prompt is computed once and the answers eight times.
`PackedSpan` tells the attention which positions belong together; position ids continue from the prompt, so every
log-prob equals that of the rollout alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from trainer.data.example import TokenTargets, TrainingExample


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """Positions [start, end) of the packed sequence. They attend to each other causally, and to the whole prompt
    [prefix_start, prefix_end), which is empty for a prompt itself."""

    start: int
    end: int
    prefix_start: int
    prefix_end: int


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """The spans as sequences of unequal length. Span i has the queries [queries[i], queries[i + 1]) and, of the
    gathered keys, [keys[i], keys[i + 1]): those of its prompt, then its own. A causal mask aligned to the last query
    and key is therefore correct. `rows` int64 gathers the keys; `queries` and `keys` are int32."""

    rows: Tensor
    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


def layout_for(spans: Sequence[PackedSpan], device: str) -> SpanLayout | None:
    """Returns the layout that the attention of a device needs: None on a CPU, which has no flash attention."""
    return None if device == "cpu" else layout_of(spans, device)


def layout_of(spans: Sequence[PackedSpan], device: str) -> SpanLayout:
    """Returns the layout of a micro-batch, on a device. A copy to a GPU waits for everything that was started there."""
    query_lengths = [span.end - span.start for span in spans]
    key_lengths = [
        span.prefix_end - span.prefix_start + length for span, length in zip(spans, query_lengths, strict=True)
    ]
    rows = [torch.arange(*part) for s in spans for part in ((s.prefix_start, s.prefix_end), (s.start, s.end))]
    queries, keys = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (query_lengths, key_lengths))
    return SpanLayout(
        torch.cat(rows).to(device), queries.to(device), keys.to(device), max(query_lengths), max(key_lengths)
    )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of T positions and m trained tokens.

    `input_ids`, `position_ids` int64 [T]; `spans` cover [0, T) in order. Per trained token, [m]: `source`, the position
    whose output predicts it; `targets`, its id; `temperatures`; and `token_targets`, the input of the losses.
    `layout` of the spans, as `layout_for` gives it.
    """

    input_ids: Tensor
    position_ids: Tensor
    spans: tuple[PackedSpan, ...]
    source: Tensor
    targets: Tensor
    temperatures: Tensor
    token_targets: TokenTargets
    layout: SpanLayout | None = None

    def to(self, device: str) -> "PackedBatch":
        """Returns a copy with its tensors on a device, and on a GPU with its layout."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        layout = layout_for(self.spans, device)
        return PackedBatch(spans=self.spans, token_targets=self.token_targets.to(device), layout=layout, **moved)


def pack_examples(examples: Sequence[TrainingExample]) -> PackedBatch:
    """Packs rollouts into one micro-batch. `examples`: at least one, each with at least one trained token. A prompt
    that several of them share is packed once."""
    prompts: dict[bytes, PackedSpan] = {}
    spans: list[PackedSpan] = []
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    sources: list[Tensor] = []
    end = 0
    for example in examples:
        # The prompt's last token predicts the first trained one, so it belongs to the prompt.
        split = int(example.trained_indices[0])
        prompt = example.token_ids[:split]
        key = prompt.numpy().tobytes()
        if key not in prompts:
            prompts[key] = PackedSpan(end, end + split, end, end)
            spans.append(prompts[key])
            ids.append(prompt)
            positions.append(torch.arange(split))
            end += split
        span = prompts[key]
        # The last trained token and the tokens after it predict no trained token.
        rest = example.token_ids[split : int(example.trained_indices[-1])]
        if len(rest):
            spans.append(PackedSpan(end, end + len(rest), span.start, span.end))
            ids.append(rest)
            positions.append(torch.arange(split, split + len(rest)))
        before = example.trained_indices - 1
        sources.append(torch.where(before < split, span.start + before, end + before - split))
        end += len(rest)
    return PackedBatch(
        input_ids=torch.cat(ids),
        position_ids=torch.cat(positions),
        spans=tuple(spans),
        source=torch.cat(sources),
        targets=torch.cat([example.token_ids[example.trained_indices] for example in examples]),
        temperatures=torch.cat([_temperatures(e) for e in examples]),
        token_targets=TokenTargets.cat([example.token_targets for example in examples]),
    )


def _temperatures(example: TrainingExample) -> torch.Tensor:
    """Returns the temperature of each trained token, float32. One over float32's largest number, which torch would
    refuse, becomes NaN, so that the step is not finite and its cause is found (culprits.py)."""
    temperature = torch.tensor(example.temperature, dtype=torch.float64).float()
    temperature = temperature.where(temperature.isfinite(), torch.nan)
    return temperature.expand(len(example.trained_indices))
