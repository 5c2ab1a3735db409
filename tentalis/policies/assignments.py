"""Assignments: the versions that answer the tasks of a worker, an environment or a policy; folded from the log. Pure.

The worker's assignment comes first, then its environment's, then the shared one. Each applies to its share of the
tasks, by a hash of the task's id or the session's. So all samples of a group, and all turns of a session, have one
version, and a repeated task has the same again.
"""

import hashlib
from collections.abc import Callable, Iterator

from schemas.records import Assignment, AssignmentAck, AssignmentScope, Record

_BUCKETS = 1_000_000


def share_of(assignment_key: str, unit: str) -> float:
    """The place of a unit (a task's or a session's id) in [0, 100) under an assignment. Fixed for ever, and independent
    between assignments: a larger `percent` keeps the units of a smaller one."""
    digest = hashlib.sha256(f"{assignment_key}\n{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _BUCKETS * 100.0 / _BUCKETS


class Assignments:
    """The fold over tentalis.policies.v1: the assignments in force, by key."""

    def __init__(self) -> None:
        self._in_force: dict[str, Assignment] = {}

    def apply(self, record: Record) -> bool:
        """Applies a record, in log order; returns True if anything changed."""
        if not isinstance(record, Assignment) or record.scope is AssignmentScope.UNKNOWN:
            return False
        before = self._in_force.pop(record.key, None)
        if record.active:
            self._in_force[record.key] = record
        return before != self._in_force.get(record.key)

    def __iter__(self) -> Iterator[Assignment]:
        """Yields the assignments in force, sorted by key."""
        return iter([self._in_force[key] for key in sorted(self._in_force)])

    def versions(self, policy: str) -> set[int]:
        """The versions of a policy that are assigned by number: they must stay on disk and on the servers."""
        return {each.version for each in self if each.policy == policy and each.version is not None}

    def names(self) -> list[str]:
        """The `policy@vN` that are assigned by number."""
        return sorted({each.name for each in self if each.version is not None})

    def chosen(self, policy: str, *, worker_id: str, environment: str, unit: str) -> Assignment | None:
        """The assignment that applies to a task of `policy`; None if its policy's served version answers it."""
        for scope, subject in (
            (AssignmentScope.WORKER, worker_id),
            (AssignmentScope.ENVIRONMENT, environment),
            (AssignmentScope.SHARED, ""),
        ):
            found = self._in_force.get(f"assign/{scope.value}/{subject}/{policy}")
            if found is not None and share_of(found.key, unit) < found.percent:
                return found
        return None


class AssignedVersions:
    """The fold of assignments and of the servers' acknowledgements of assigned versions."""

    def __init__(self) -> None:
        self.assignments = Assignments()
        self._held: dict[tuple[str, str], bool] = {}

    def apply(self, record: Record) -> bool:
        """Applies a record of tentalis.policies.v1 or tentalis.policy-acks.v1; returns True if anything changed."""
        if not isinstance(record, AssignmentAck):
            return self.assignments.apply(record)
        before = self._held.get((record.server_id, record.name))
        self._held[record.server_id, record.name] = record.ok
        return before != record.ok

    def name(
        self,
        server_id: str,
        policy: str,
        *,
        served: Callable[[str], str | None],
        worker_id: str,
        environment: str,
        unit: str,
    ) -> str | None:
        """The `policy@vN` that an assignment chooses for a task of `policy` at a server; None if no assignment applies,
        or if the server does not have the chosen version: then the served version answers.

        `served`: `policy@vN` as the server serves a policy. `unit`: the task's or the session's id.
        """
        chosen = self.assignments.chosen(policy, worker_id=worker_id, environment=environment, unit=unit)
        if chosen is None:
            return None
        now = served(chosen.policy)
        if chosen.version is None or chosen.name == now:
            return now
        return chosen.name if self._held.get((server_id, chosen.name)) else None
