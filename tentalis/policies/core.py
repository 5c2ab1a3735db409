"""What was published, promoted and acknowledged, and what follows for one server. Pure: folded from the log."""

from collections.abc import Iterable

from schemas.ids import parse_policy_name, policy_name
from schemas.records import PolicyAck, PolicyUpdate, Promotion, Record

KEPT_VERSIONS = 3
MANUAL = "manual"


class PolicyLog:
    """The fold over tentalis.policies.v1 and the acknowledgements of one server."""

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        self._updates: dict[str, PolicyUpdate] = {}
        self._newest: dict[str, tuple[PolicyUpdate, int]] = {}
        self._promoted: dict[str, tuple[Promotion, int]] = {}
        self._acked: dict[str, PolicyAck] = {}
        self._good: dict[str, int] = {}

    def apply(self, record: Record, offset: int) -> None:
        """Takes in a record, in the log order of its topic. `offset` is its place on that topic's one partition."""
        match record:
            case PolicyUpdate():
                self._updates[record.name] = record
                newest = self._newest.get(record.policy)
                if newest is None or record.version > newest[0].version:
                    self._newest[record.policy] = (record, offset)
            case Promotion():
                self._promoted[record.policy] = (record, offset)
            case PolicyAck() if record.server_id == self._server_id:
                self._acked[record.policy] = record
                if record.ok:
                    self._good[record.policy] = record.version
            case _:
                return

    def due_promotions(self) -> list[PolicyUpdate]:
        """For the guard that promotes always: per policy the newest update, if it is newer than what is promoted.

        A promotion by hand (a rollback, say) stands against everything published before it.
        """
        due = []
        for policy, (update, offset) in self._newest.items():
            promotion, promoted_at = self._promoted.get(policy, (None, -1))
            if promotion is not None:
                if update.version <= promotion.version:
                    continue
                if promotion.mode == MANUAL and offset < promoted_at:
                    continue
            due.append(update)
        return due

    @property
    def policies(self) -> list[str]:
        """The policies of which some version is promoted."""
        return sorted(self._promoted)

    def promotion(self, policy: str) -> Promotion:
        """The promotion in force."""
        return self._promoted[policy][0]

    def update(self, name: str) -> PolicyUpdate | None:
        """The published `policy@vN`, or None if the log has none of that name."""
        return self._updates.get(name)

    def candidates(self, policy: str) -> list[str]:
        """The names that the server may serve, best first: the promoted version, else the last that it served well."""
        names = [self.promotion(policy).name]
        if policy in self._good and (good := policy_name(policy, self._good[policy])) not in names:
            names.append(good)
        return names

    def served_version(self, policy: str) -> int | None:
        """The version that the server acknowledged last, None if it never did."""
        return self._good.get(policy)

    def acknowledged(self, name: str) -> bool:
        """Whether the server's last word on this policy is that it serves `name`."""
        ack = self._acked.get(parse_policy_name(name)[0])
        return ack is not None and ack.ok and ack.name == name


def surplus(loaded: Iterable[str], serving: Iterable[str]) -> list[str]:
    """Which of the loaded adapters to unload: all but the newest KEPT_VERSIONS of each policy and those being served.

    Models that are not named `policy@vN` are nobody's business here.
    """
    by_policy: dict[str, list[int]] = {}
    for name in loaded:
        try:
            policy, version = parse_policy_name(name)
        except ValueError:
            continue
        by_policy.setdefault(policy, []).append(version)
    kept = set(serving)
    return [
        name
        for policy, versions in sorted(by_policy.items())
        for version in sorted(versions, reverse=True)[KEPT_VERSIONS:]
        if (name := policy_name(policy, version)) not in kept
    ]
