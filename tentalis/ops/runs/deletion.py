"""Decides what of a run can be deleted from the state directory and the object store, with the consequences. Pure.

Records on the log are never deleted: they number the policy's versions, name the rollouts that were trained on, and are
what a replay reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tentalis.storage.location import Location


class DeletionRefused(Exception):
    """A run of which nothing may be deleted now. The message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A folder of a run, on this machine or in an object store. `version`: of the policy, for checkpoints and
    adapters."""

    kind: str
    place: Location
    bytes: int
    version: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class DeletionRow:
    """A folder with the decision: `keep` is the reason why it stays, "" if it is deleted."""

    part: StoredPart
    keep: str


def plan_deletion(
    parts: Sequence[StoredPart], needed: Collection[int], children: Mapping[str, int], resumable: bool
) -> list[DeletionRow]:
    """Returns the decision for every folder.

    Args:
        needed: versions that may be served again: promoted, candidates, targets of a rollback, pinned, assigned.
        children: runs that continue this one, by the step from which each does.
        resumable: it is the newest run of its policy, so a trainer that starts continues it.
    """
    newest = max((part.step for part in parts if part.kind == "checkpoint" and part.step is not None), default=None)
    return [DeletionRow(part, _keep(part, needed, children, newest if resumable else None)) for part in parts]


def _keep(part: StoredPart, needed: Collection[int], children: Mapping[str, int], newest: int | None) -> str:
    if part.version in needed:
        return f"v{part.version} is served, waits for a decision, is pinned, assigned or a target of a rollback"
    if part.kind == "checkpoint":
        branches = sorted(name for name, step in children.items() if step == part.step)
        if branches:
            return f"{', '.join(branches)} continues from this step"
        if part.step == newest:
            return "a trainer that starts continues from it"
    return ""


def consequences(rows: Sequence[DeletionRow], run_id: str) -> list[str]:
    """Returns what is no longer possible after the deletion."""
    gone = [row.part for row in rows if not row.keep]
    found = []
    if any(part.kind == "checkpoint" for part in gone):
        found.append(
            f"`tentalis replay {run_id}` trains from the nearest checkpoint that is left, or from the run's beginning: "
            "it takes longer and gives the same bytes"
        )
    versions = sorted(part.version for part in gone if part.kind == "adapter" and part.version is not None)
    if versions:
        names = ", ".join(f"v{version}" for version in versions)
        found.append(
            f"{names} can no longer be promoted or rolled back to; a replay with --into writes the same adapters again"
        )
    if any(part.kind in ("tracking", "report") for part in gone):
        found.append("files of trackers and reports are gone; the metrics of every step stay on the log")
    return found
