"""Which of a batch's sequences begin alike, so that the common beginning is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# A shorter common beginning costs more to copy than to compute.
_LEAST = 16


@dataclass(frozen=True)
class Family:
    """Sequences (their places in the batch) that share their first `length` tokens; 0 where nothing is shared.

    `length` leaves every member at least one token of its own.
    """

    members: tuple[int, ...]
    length: int


def families(sequences: Sequence[Sequence[int]], kinds: Sequence[object]) -> list[Family]:
    """A partition of the sequences that saves the most tokens: of each family all but one prefix need not be computed.

    Only sequences of the same kind (adapter) can share. Sorted, sequences with a common beginning are neighbours, and
    the best partition into runs of neighbours is found by dynamic programming.
    """
    by_kind: dict[int, list[int]] = {}
    for place, kind in enumerate(kinds):
        by_kind.setdefault(id(kind), []).append(place)
    found: list[Family] = []
    for places in by_kind.values():
        found += _best_runs(sorted(places, key=lambda place: list(sequences[place])), sequences)
    return found


def _best_runs(order: list[int], sequences: Sequence[Sequence[int]]) -> list[Family]:
    shared = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    # saved[j]: the most tokens saved among the first j; cut[j]: where the last run of that solution begins.
    saved, cut, length = [0], [0], [0]
    for end in range(1, len(order) + 1):
        best = (saved[end - 1], end - 1, 0)
        run = len(sequences[order[end - 1]]) - 1
        for begin in range(end - 2, -1, -1):
            run = min(run, shared[begin], len(sequences[order[begin]]) - 1)
            if run < _LEAST:
                break
            best = max(best, (saved[begin] + (end - begin - 1) * run, begin, run))
        for column, value in zip((saved, cut, length), best, strict=True):
            column.append(value)
    runs = []
    end = len(order)
    while end:
        runs.append(Family(tuple(order[cut[end] : end]), length[end]))
        end = cut[end]
    return runs[::-1]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))
