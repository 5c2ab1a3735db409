"""Teacher forcing: the log-prob of every token of given sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tentalis.inference.prefixes import PrefixFamily, prefix_families
from tentalis.inference.protocol import Float32
from tentalis.inference.runtime import ModelRuntime
from tentalis.inference.whole_model import ServedVersion

# Rows of fp32 logits held at once: 64 x 49,152 x 4 bytes = 13 MB. Measured: beyond 32 MB malloc maps new memory for
# every chunk, and the page faults cost ten times as much per row.
_HEAD_ROWS = 64


@dataclass(frozen=True)
class ScoredTokens:
    """Scores of a sequence of n tokens: `logprobs` fp32 [n] (index 0 is NaN), `ranks` [n] (1 = most likely; index 0 is
    0), and per token the most likely alternatives with their log-probs (empty at index 0 and if none are requested)."""

    logprobs: Float32
    ranks: list[int]
    top: list[list[tuple[int, float]]]


def score_batch(
    runtime: ModelRuntime,
    sequences: Sequence[Sequence[int]],
    adapters: Sequence[ServedVersion | None],
    temperatures: Sequence[float],
    tops: Sequence[int],
) -> list[ScoredTokens]:
    """log p(token i | tokens before i) of each sequence under its version, at its temperature. All versions compute
    with the same whole model, or with none (see ModelRuntime.route).

    A prefix that sequences share runs through the model once; the head runs in chunks, over unpadded positions only.
    """
    hidden, token_rows = _hidden_states(runtime, sequences, adapters)
    counts = [len(sequence) - 1 for sequence in sequences]
    state_rows = np.concatenate([rows[:-1] for rows in token_rows])
    targets = np.concatenate([np.asarray(sequence[1:], dtype=np.int64) for sequence in sequences])
    temperature = np.repeat(np.asarray(temperatures, dtype=np.float32), counts)
    logprobs, ranks, best = _score_targets(runtime, hidden, state_rows, targets, temperature, max(tops, default=0))
    results = []
    begin = 0
    for count, wanted in zip(counts, tops, strict=True):
        part = slice(begin, begin + count)
        begin += count
        alternatives = [entry[:wanted] for entry in best[part]] if wanted else [[] for _ in range(count)]
        results.append(
            ScoredTokens(
                np.concatenate([np.full(1, np.nan, dtype=np.float32), logprobs[part]]),
                [0, *ranks[part].tolist()],
                [[], *alternatives],
            )
        )
    return results


def _hidden_states(
    runtime: ModelRuntime, sequences: Sequence[Sequence[int]], adapters: Sequence[ServedVersion | None]
) -> tuple[Tensor, list[np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Hidden states [N, hidden], and for each sequence the row indices [n] of its tokens' states."""
    device = runtime.device
    groups = prefix_families(sequences, adapters)
    sharing = [group for group in groups if group.length]
    if not sharing:
        # Padding is on the right, where causal attention never sees it.
        tokens = _padded(sequences)
        runtime.route(adapters)
        step = runtime.prefill_step(None, range(len(sequences)), tokens.shape[1])
        hidden = runtime.hidden(torch.from_numpy(tokens).to(device), step).flatten(0, 1)
        return hidden, [row * tokens.shape[1] + np.arange(len(sequence)) for row, sequence in enumerate(sequences)]

    # Pass one: each shared prefix, in the cache row of its family's first member. Pass two: all the rest.
    order = [(index, group) for group in groups for index in group.members]
    row_of = {index: row for row, (index, _) in enumerate(order)}
    starts = [group.length for _, group in order]
    prefixes = _padded([sequences[group.members[0]][: group.length] for group in sharing])
    rests = _padded([sequences[index][group.length :] for index, group in order])
    cache = runtime.new_cache()
    cache.resize(len(order), max(prefixes.shape[1], max(starts) + rests.shape[1]), 0)
    heads = [row_of[group.members[0]] for group in sharing]
    runtime.route([adapters[group.members[0]] for group in sharing])
    step = runtime.prefill_step(cache, heads, prefixes.shape[1])
    first = runtime.hidden(torch.from_numpy(prefixes).to(device), step).flatten(0, 1)
    for group in sharing:
        rows = [row_of[index] for index in group.members]
        cache.copy_rows([rows[0]] * (len(rows) - 1), rows[1:], group.length)
    runtime.route([adapters[index] for index, _ in order])
    step = runtime.continue_step(cache, torch.tensor(starts, device=device), rests.shape[1])
    second = runtime.hidden(torch.from_numpy(rests).to(device), step).flatten(0, 1)

    begin = {group.members: number * prefixes.shape[1] for number, group in enumerate(sharing)}
    token_rows = [
        _state_rows(sequence, order[row_of[index]][1], begin, len(first) + row_of[index] * rests.shape[1])
        for index, sequence in enumerate(sequences)
    ]
    return torch.cat([first, second]), token_rows


def _state_rows(
    sequence: Sequence[int], group: PrefixFamily, begin: dict[tuple[int, ...], int], rest: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    shared = begin.get(group.members, 0) + np.arange(group.length)
    return np.concatenate([shared, rest + np.arange(len(sequence) - group.length)])


def _padded(sequences: Sequence[Sequence[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    tokens = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens


def _score_targets(
    runtime: ModelRuntime,
    hidden: Tensor,
    state_rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    targets: np.ndarray[tuple[int], np.dtype[np.int64]],
    temperature: Float32,
    top: int,
) -> tuple[Float32, np.ndarray[tuple[int], np.dtype[np.int64]], list[list[tuple[int, float]]]]:
    """For each (place, target, temperature): log-prob and rank of the target, and the `top` most likely tokens."""
    keys = np.stack([state_rows, targets, temperature.view(np.int32)])
    unique, inverse = np.unique(keys, axis=1, return_inverse=True)  # members of a family share the prefix's entries
    device = runtime.device
    logprobs = np.empty(unique.shape[1], dtype=np.float32)
    ranks = np.empty(unique.shape[1], dtype=np.int64)
    best: list[list[tuple[int, float]]] = []
    for start in range(0, unique.shape[1], _HEAD_ROWS):
        part = slice(start, start + _HEAD_ROWS)
        logits = runtime.logits(hidden[torch.from_numpy(unique[0, part]).to(device)])
        scale = unique[2, part].astype(np.int32).view(np.float32)
        if (scale != 1).any():
            logits.div_(torch.from_numpy(scale).to(device)[:, None])
        chosen = logits.gather(1, torch.from_numpy(unique[1, part]).to(device)[:, None])
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        logprobs[part] = (chosen - normaliser)[:, 0].cpu().numpy()
        if top:
            values, ids = logits.topk(top, dim=-1)
            values = values - normaliser
            best += [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        # In place, because the logits are no longer needed; a count of ones in fp32 is exact up to 2^24.
        ranks[part] = logits.gt_(chosen).sum(dim=-1).cpu().numpy() + 1
    inverse = inverse.reshape(-1)
    return logprobs[inverse], ranks[inverse], [best[index] for index in inverse] if top else []
