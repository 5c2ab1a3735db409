"""Whether the trainer asks for no more rollouts of a policy, folded from tentalis.policies.v1."""

from schemas.records import BackPressure, Record


class Pressure:
    """The fold. A statement that is older than it holds means nothing: the trainer is gone, or has forgotten it."""

    def __init__(self) -> None:
        self._said: dict[str, BackPressure] = {}

    def apply(self, record: Record) -> bool:
        """Takes in a record, in log order; tells whether anything changed."""
        if not isinstance(record, BackPressure):
            return False
        before = self._said.get(record.policy)
        self._said[record.policy] = record
        return before is None or before.closed != record.closed

    def closed(self, policy: str, now_ms: int) -> BackPressure | None:
        """The statement that holds at `now_ms` and says that what is sampled now would be thrown away, or None."""
        said = self._said.get(policy)
        return said if said is not None and said.closed and now_ms < said.expires_at else None
