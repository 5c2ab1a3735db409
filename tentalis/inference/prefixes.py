"""Groups a batch's sequences by common prefix, so that each common prefix is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# A shorter common prefix costs more to copy than to compute.
_MIN_SHARED_TOKENS = 16


@dataclass(frozen=True)
class PrefixFamily:
    """Sequences (as indices of the batch) that share their first `length` tokens; 0 if they share nothing.

    Every member has at least one token after these.
    """

    members: tuple[int, ...]
    length: int


def prefix_families(sequences: Sequence[Sequence[int]], kinds: Sequence[object]) -> list[PrefixFamily]:
    """The partition of the sequences that saves the most tokens: each family computes its prefix once.

    Only sequences of the same kind (adapter) can share a prefix. Sorting makes sequences with a common prefix adjacent;
    dynamic programming then finds the best partition into runs of adjacent sequences.
    """
    by_kind: dict[int, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(id(kind), []).append(index)
    result: list[PrefixFamily] = []
    for indices in by_kind.values():
        result += _best_runs(sorted(indices, key=lambda index: list(sequences[index])), sequences)
    return result


def _best_runs(order: list[int], sequences: Sequence[Sequence[int]]) -> list[PrefixFamily]:
    shared = [_common_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    # saved[j]: the most tokens saved among the first j; cut[j]: where the last run of that solution begins.
    saved, cut, length = [0], [0], [0]
    for end in range(1, len(order) + 1):
        best = (saved[end - 1], end - 1, 0)
        run = len(sequences[order[end - 1]]) - 1
        for begin in range(end - 2, -1, -1):
            run = min(run, shared[begin], len(sequences[order[begin]]) - 1)
            if run < _MIN_SHARED_TOKENS:
                break
            best = max(best, (saved[begin] + (end - begin - 1) * run, begin, run))
        for column, value in zip((saved, cut, length), best, strict=True):
            column.append(value)
    runs = []
    end = len(order)
    while end:
        runs.append(PrefixFamily(tuple(order[cut[end] : end]), length[end]))
        end = cut[end]
    return runs[::-1]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
