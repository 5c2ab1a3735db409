"""Backpressure: the policies of which the trainer wants no more rollouts, folded from tentalis.policies.v1."""

from schemas.records import BackPressure, Record


class Backpressure:
    """The fold. An expired statement is ignored: the trainer has stopped, or lost its state."""

    def __init__(self) -> None:
        self._statements: dict[str, BackPressure] = {}

    def apply(self, record: Record) -> bool:
        """Applies a record, in log order; returns True if anything changed."""
        if not isinstance(record, BackPressure):
            return False
        before = self._statements.get(record.policy)
        self._statements[record.policy] = record
        return before is None or before.closed != record.closed

    def closed(self, policy: str, now_ms: int, *, for_candidate: bool = False) -> BackPressure | None:
        """The valid statement at `now_ms` that new samples of the policy's served version would be discarded, or None.
        `for_candidate`: samples of its newest version, which is not served yet."""
        statement = self._statements.get(policy)
        if statement is None or not statement.closed or now_ms >= statement.expires_at:
            return None
        return None if for_candidate and statement.waiting <= statement.max_staleness else statement
