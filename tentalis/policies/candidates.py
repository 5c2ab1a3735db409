"""The published versions on which no decision was made yet, and the tasks that are issued for them. Pure.

While the guard tries a candidate, an on-policy run has nothing else to do. So the manager issues the next round for the
candidate, and workers sample it beside the trial. They keep the answers to themselves until the candidate is served,
and drop them if it is refused: nobody gets an answer of a version that the guard has not passed.
"""

from schemas.ids import parse_policy_name, policy_name
from schemas.records import PolicyAck, PolicyUpdate, Promotion, Record, Task

# Metadata key of a task: the version that it was issued for, which was served then or was the candidate.
ISSUED_FOR = "served"


class Candidates:
    """The fold over tentalis.policies.v1 and tentalis.policy-acks.v1, each in its order.

    `server_id` narrows the acknowledgements to one server; without it those of any server count.
    """

    def __init__(self, server_id: str | None = None) -> None:
        self._server_id = server_id
        self._newest: dict[str, int] = {}
        self._overruled: set[str] = set()
        self._acknowledged: dict[str, int] = {}

    def apply(self, record: Record) -> bool:
        """Applies a record. Returns True if a candidate appeared or was decided on."""
        match record:
            case PolicyUpdate() if record.version > self._newest.get(record.policy, -1):
                self._newest[record.policy] = record.version
                self._overruled.discard(record.policy)
            case Promotion() if record.version != self._newest.get(record.policy, record.version):
                self._overruled.add(record.policy)
            case PolicyAck() if self._server_id in (None, record.server_id):
                self._acknowledged[record.policy] = max(record.version, self._acknowledged.get(record.policy, -1))
            case _:
                return False
        return True

    def version(self, policy: str) -> int | None:
        """The newest version of a policy, if no server has acknowledged it and no promotion of another version followed
        it; else None."""
        newest = self._newest.get(policy)
        decided = newest is None or policy in self._overruled or newest <= self._acknowledged.get(policy, -1)
        return None if decided else newest

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
