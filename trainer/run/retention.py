"""Selection of the versions that must stay on disk. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice


def versions_to_keep(
    present: Collection[int],
    newest: int,
    max_staleness: int,
    promoted: Sequence[int],
    pinned: Collection[int],
    weights: Mapping[int, str],
) -> set[int]:
    """Returns the `present` versions that must not be pruned: within the staleness window of `newest`, served or
    waiting for a decision, pinned, and possible targets of a rollback.

    `promoted`: the promoted versions in log order; the last is served. `weights`: the digests of the published
    versions. A rollback returns to one of the two versions with other weights that were served before: a branch begins
    with weights that were served already. A version that was served before an older one was promoted again is taken
    back. If the log no longer has them, because compaction has left the last promotion only, every version below the
    served one is kept until there are others.
    """
    if not promoted:
        return set(present)
    served = promoted[-1]
    kept = {version for version in present if version >= served or version >= newest - max_staleness}
    served_before: list[int] = []
    for version in promoted:
        served_before = [*(before for before in served_before if before < version), version]
    below_served = [version for version in present if version < served]
    kept.update(_two_of_other_weights(served, reversed(served_before[:-1]), weights) or below_served)
    return (kept | set(pinned) | {served}) & set(present)


def _two_of_other_weights(served: int, versions: Iterable[int], weights: Mapping[int, str]) -> list[int]:
    """Returns the first two versions whose weights differ from those of the served one and from each other's."""
    found: dict[str, int] = {}
    for version in versions:
        digest = weights.get(version, f"v{version}")
        if digest != weights.get(served):
            found.setdefault(digest, version)
    return list(islice(found.values(), 2))
