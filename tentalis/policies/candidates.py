"""The published versions on which no decision was made yet, and the tasks that are issued for them. Pure.

While the guard tries a candidate, an on-policy run has nothing else to do. So the manager issues the next round for the
candidate, and workers sample it beside the trial. They keep the answers to themselves until the candidate is served,
and drop them if it is refused: nobody gets an answer of a version that the guard has not passed.
"""

from schemas.ids import parse_policy_name, policy_name
from schemas.records import PolicyAck, PolicyUpdate, Promotion, Record, Task
from tentalis.policies.newest import NewestVersions
from tentalis.policies.served import ServedVersions

# Metadata key of a task: the version that it was issued for, which was served then or was the candidate.
ISSUED_FOR = "served"


class Candidates:
    """The fold over tentalis.policies.v1 and tentalis.policy-acks.v1, each in its order.

    `server_id` narrows the acknowledgements to one server; without it those of any server count.
    """

    def __init__(self, server_id: str | None = None) -> None:
        self._versions = NewestVersions()
        self._served = ServedVersions(server_id)
        self._servers: dict[str, ServedVersions] = {}
        self._applied = 0

    def apply(self, record: Record) -> bool:
        """Applies a record. Returns True if a candidate may have appeared or been decided on."""
        match record:
            case PolicyUpdate() | Promotion():
                self._applied += 1
                self._versions.apply(record, self._applied)
                return True
            case PolicyAck():
                changed = self._servers.setdefault(record.server_id, ServedVersions()).apply(record)
                return self._served.apply(record) or changed
            case _:
                return False

    def version(self, policy: str) -> int | None:
        """The newest version of a policy, if it may come to be served: it is undecided or promoted, and no server
        serves it yet; else None. A server that failed to load it tries again."""
        newest, promotion = self._versions.newest(policy), self._versions.promotions.get(policy)
        served = self._served.version(policy)
        if newest is None or (served is not None and newest.version <= served):
            return None
        promoted = promotion is not None and promotion.version == newest.version
        return newest.version if promoted or self._versions.undecided(policy) is not None else None

    def published(self, policy: str, version: int) -> bool:
        """True if this version of a policy, or a newer one, is published."""
        newest = self._versions.newest(policy)
        return newest is not None and newest.version >= version

    def served_by_any(self, policy: str, version: int) -> bool:
        """True if any server serves this version of a policy, or a newer one."""
        found = (each.version(policy) for each in self._servers.values())
        return any(served is not None and served >= version for served in found)

    def covers(self, task: Task) -> bool:
        """True if a task was issued for what is the candidate of its policy now."""
        candidate = self.version(task.policy)
        return candidate is not None and task.metadata.get(ISSUED_FOR) == policy_name(task.policy, candidate)


def issued_for(task: Task) -> int | None:
    """The version that a task was issued for; None if it names none. Raises ValueError if that is no `policy@vN`."""
    name = task.metadata.get(ISSUED_FOR)
    return None if name is None else parse_policy_name(name)[1]


def issue_metadata(policy: str, version: int) -> dict[str, str]:
    """The metadata of a task that is issued for a version."""
    return {ISSUED_FOR: policy_name(policy, version)}
