"""Selection of the versions that must stay on disk. Pure."""

from collections.abc import Collection, Sequence


def versions_to_keep(
    present: Collection[int], newest: int, max_staleness: int, promoted: Sequence[int], pinned: Collection[int]
) -> set[int]:
    """Returns the `present` versions that must not be pruned: within the staleness window of `newest`, served or
    waiting for a decision, pinned, and possible targets of a rollback.

    `promoted`: the promoted versions in log order; the last is served. A rollback returns to one of the two versions
    served before: a branch begins with weights that were served already. If the log no longer has them, the two newest
    versions below the served one are kept instead.
    """
    if not promoted:
        return set(present)
    served = promoted[-1]
    kept = {version for version in present if version >= served or version >= newest - max_staleness}
    served_before = dict.fromkeys(version for version in reversed(promoted) if version < served)
    below_served = sorted(version for version in present if version < served)
    kept.update(list(served_before)[:2] or below_served[-2:])
    return (kept | set(pinned) | {served}) & set(present)
