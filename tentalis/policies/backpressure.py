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

    def closed(self, policy: str, now_ms: int) -> BackPressure | None:
        """The valid statement at `now_ms` that new samples of the policy would be discarded, or None."""
        statement = self._statements.get(policy)
        return statement if statement is not None and statement.closed and now_ms < statement.expires_at else None
