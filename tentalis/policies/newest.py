"""The newest published version of each policy and the promotion in force, folded from tentalis.policies.v1. Pure."""

from schemas.records import PolicyUpdate, Promotion
from tentalis.policies.guard import ROLLBACK, GuardMode

# A promotion of such a mode overrides everything that was published before it.
DECIDED_MODES = (GuardMode.MANUAL, ROLLBACK)


class NewestVersions:
    """The fold. `promotions`: the promotion in force, by policy."""

    def __init__(self) -> None:
        self.promotions: dict[str, Promotion] = {}
        self._newest: dict[str, tuple[PolicyUpdate, int]] = {}
        self._promoted_at: dict[str, int] = {}
        # By policy: the run that the promotion in force ends, if it is a rollback.
        self._ended_runs: dict[str, str | None] = {}

    def apply(self, record: PolicyUpdate | Promotion, offset: int) -> None:
        """Applies a record, in the order of the log. `offset`: its place there."""
        policy = record.policy
        if isinstance(record, PolicyUpdate):
            newest = self.newest(policy)
            if newest is None or record.version > newest.version:
                self._newest[policy] = record, offset
            return
        self.promotions[policy] = record
        self._promoted_at[policy] = offset
        self._ended_runs[policy] = self._ended_by(record)

    def _ended_by(self, promotion: Promotion) -> str | None:
        """The run that a rollback ends: the last to publish, unless the rollback goes back to its newest version."""
        last = self.newest(promotion.policy)
        if promotion.mode != ROLLBACK or last is None:
            return None
        return None if last.sha256 == promotion.sha256 else last.run_id

    def newest(self, policy: str) -> PolicyUpdate | None:
        """The newest published version of a policy, None if none is on the log."""
        found = self._newest.get(policy)
        return None if found is None else found[0]

    def undecided(self, policy: str) -> PolicyUpdate | None:
        """The newest version, if it is newer than the promoted one and no decision overrides it; else None."""
        if policy not in self._newest:
            return None
        (update, offset), promotion = self._newest[policy], self.promotions.get(policy)
        if promotion is None:
            return update
        overridden = promotion.mode in DECIDED_MODES and offset < self._promoted_at[policy]
        ended = update.run_id == self._ended_runs[policy]
        return None if update.version <= promotion.version or overridden or ended else update

    def all_undecided(self) -> list[PolicyUpdate]:
        """The undecided versions of all policies."""
        return [update for policy in self._newest if (update := self.undecided(policy)) is not None]
