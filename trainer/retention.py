"""Which versions must stay on disk. Pure."""

from collections.abc import Collection, Sequence


def needed(
    present: Collection[int], head: int, max_staleness: int, promoted: Sequence[int], pinned: Collection[int]
) -> set[int]:
    """Those of the `present` versions that must not be pruned: within the staleness window of `head`, served or still
    waiting for a decision, pinned, and what a rollback goes back to.

    `promoted` is what was promoted, in log order, the last is served. A rollback goes back to what was served before,
    or before that: a branch begins with weights that were served already. Where the log does not tell any more, the two
    newest versions below the served one are kept for it.
    """
    if not promoted:
        return set(present)
    served = promoted[-1]
    kept = {version for version in present if version >= served or version >= head - max_staleness}
    before = dict.fromkeys(version for version in reversed(promoted) if version < served)
    below = sorted(version for version in present if version < served)
    kept.update(list(before)[:2] or below[-2:])
    return (kept | set(pinned) | {served}) & set(present)
