"""The served version of each policy, folded from the servers' acknowledgements.

A server acknowledges only promoted versions, after it has checked hash and canary; so its last good acknowledgement
names the version that it serves, also after a rollback. A failed one changes nothing: the old version stays.
"""

from schemas.ids import policy_name
from schemas.records import PolicyAck, Record


class ServedVersions:
    """The fold. `server_id` narrows it to one server; without it the last good acknowledgement of any server counts."""

    def __init__(self, server_id: str | None = None) -> None:
        self._server_id = server_id
        self._versions: dict[str, int] = {}

    def apply(self, record: Record) -> bool:
        """Applies a record of tentalis.policy-acks.v1, in log order; returns True if anything changed."""
        if not isinstance(record, PolicyAck) or not record.ok:
            return False
        if self._server_id is not None and record.server_id != self._server_id:
            return False
        changed = self._versions.get(record.policy) != record.version
        self._versions[record.policy] = record.version
        return changed

    def version(self, policy: str) -> int | None:
        """The version served now, None if none was ever served."""
        return self._versions.get(policy)

    def name(self, policy: str) -> str | None:
        """`policy@vN` as it is served now, or None."""
        version = self.version(policy)
        return None if version is None else policy_name(policy, version)
