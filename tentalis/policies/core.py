"""What was published, promoted and acknowledged, and what follows for one server. Pure: folded from the log."""

from collections.abc import Iterable

from schemas.ids import parse_policy_name, policy_name
from schemas.records import EvalResult, PolicyAck, PolicyUpdate, Promotion, Record, RunManifest
from tentalis.guard import CANDIDATE, LIVE, ROLLBACK, BadGuard, Mode, Rule
from tentalis.lineage import Lineage, Node

KEPT_VERSIONS = 3
# What was decided so stands against everything that was published before it.
DECIDED = (Mode.MANUAL, ROLLBACK)


class PolicyLog:
    """The fold over tentalis.policies.v1, the acknowledgements of one server, and, for the guard, runs and verdicts."""

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        self._updates: dict[str, PolicyUpdate] = {}
        self._newest: dict[str, tuple[PolicyUpdate, int]] = {}
        self._promoted: dict[str, tuple[Promotion, int]] = {}
        # By policy: the run that the promotion in force ends, if it is a rollback.
        self._ended: dict[str, str | None] = {}
        self._acked: dict[str, PolicyAck] = {}
        self._good: dict[str, int] = {}
        self._rules: dict[str, Rule] = {}
        self._manifests: list[RunManifest] = []
        self._verdicts: dict[str, EvalResult] = {}
        self.unruled: dict[str, str] = {}
        """Runs whose manifest does not say who decides, and why not: nobody does then but a person."""

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
                self._ended[record.policy] = self._ended_by(record)
            case PolicyAck() if record.server_id == self._server_id:
                self._acked[record.policy] = record
                if record.ok:
                    self._good[record.policy] = record.version
            case RunManifest():
                self._manifest(record)
            case EvalResult() if record.experiment in (CANDIDATE, LIVE):
                self._verdicts[record.policy] = record
            case _:
                return

    def _ended_by(self, promotion: Promotion) -> str | None:
        """The run that published last, unless that is what the rollback goes back to."""
        if promotion.mode != ROLLBACK or promotion.policy not in self._newest:
            return None
        last, _ = self._newest[promotion.policy]
        return None if last.sha256 == promotion.sha256 else last.run_id

    def _manifest(self, manifest: RunManifest) -> None:
        self._manifests.append(manifest)
        try:
            self._rules[manifest.run_id] = Rule.of_config(manifest.config)
        except BadGuard as error:
            self._rules[manifest.run_id] = Rule(Mode.MANUAL)
            self.unruled[manifest.run_id] = str(error)

    def due_promotions(self, *, always: bool = False) -> list[PolicyUpdate]:
        """Per policy the newest update, if it is newer than what is promoted and its run lets it be served: as it is
        (`promotion: always`), or because it passed the guard. With `always`, whatever its run says.

        What has the weights that are promoted already (a branch begins so) needs no decision, nor does the initial
        adapter of a policy of which nothing was ever served: it is the base model. A promotion by hand and a rollback
        stand against everything published before them, a rollback also against the step that its run was in.
        """
        due = []
        for update in self._news():
            if always or self._may(update):
                due.append(update)
            elif update.policy not in self._promoted and (first := self._initial(update.run_id)) is not None:
                # More than the initial adapter was published before anybody decided anything.
                due.append(first)
        return due

    def untried(self) -> list[PolicyUpdate]:
        """Updates that the guard has to try: per policy the newest, where its run is guarded and it has no verdict."""
        return [
            update
            for update in self._news()
            if self.rule(update).mode is Mode.GUARDED and not self._may(update) and self.verdict(update.name) is None
        ]

    def refused(self) -> list[PolicyUpdate]:
        """Updates that did not pass and that no rollback to what is served answers yet."""
        news = (update for update in self._news() if update.policy in self._promoted)
        return [update for update in news if self.passed(update.name) is False and not self._may(update)]

    def verdict(self, name: str) -> EvalResult | None:
        """The guard's last word on `policy@vN`, or on a version of the same weights; None if there is none."""
        if name in self._verdicts or name not in self._updates:
            return self._verdicts.get(name)
        sha256 = self._updates[name].sha256
        same = (verdict for other, verdict in self._verdicts.items() if self._sha256(other) == sha256)
        return next(same, None)

    def passed(self, name: str) -> bool | None:
        """Whether the guard lets `policy@vN` be served, None if it has not said."""
        verdict = self.verdict(name)
        return None if verdict is None else verdict.passed

    def _sha256(self, name: str) -> str | None:
        return self._updates[name].sha256 if name in self._updates else None

    def rule(self, update: PolicyUpdate) -> Rule:
        """How the versions of its run get served; a run whose manifest was not read yet promotes nothing."""
        return self._rules.get(update.run_id, Rule(Mode.MANUAL))

    def guarded(self) -> list[PolicyUpdate]:
        """What is promoted, of the policies whose run is guarded."""
        found = (self._updates.get(promotion.name) for promotion, _ in self._promoted.values())
        return [update for update in found if update is not None and self.rule(update).mode is Mode.GUARDED]

    def fallback(self, served: PolicyUpdate) -> PolicyUpdate | None:
        """What to go back to from a version that must not be served any more: the newest one that it came from and that
        passed, or was an initial adapter; None if there is none."""
        lineage = Lineage(manifest for manifest in self._manifests if manifest.policy == served.policy)
        behind = lineage.behind(Node(served.run_id, served.step))
        earlier = (
            update
            for update in self._updates.values()
            if update.policy == served.policy
            and update.version < served.version
            and update.step <= behind.get(update.run_id, -1)
            and update.sha256 != served.sha256
            and (self.passed(update.name) or (update.step == 0 and self.passed(update.name) is None))
        )
        return max(earlier, key=lambda update: update.version, default=None)

    def _may(self, update: PolicyUpdate) -> bool:
        rule, promotion = self._rules.get(update.run_id), self._promoted.get(update.policy)
        if rule is None:
            return False
        same = promotion is not None and promotion[0].sha256 == update.sha256
        return (
            same
            or (promotion is None and update.step == 0 and self._initial(update.run_id) is not None)
            or rule.mode is Mode.ALWAYS
            or (rule.mode is Mode.GUARDED and self.passed(update.name) is True)
        )

    def _initial(self, run_id: str) -> PolicyUpdate | None:
        """The initial adapter of a run whose manifest was read, None for a branch: that begins with trained weights."""
        if {manifest.parent_run for manifest in self._manifests if manifest.run_id == run_id} != {None}:
            return None
        return next((u for u in self._updates.values() if u.run_id == run_id and u.step == 0), None)

    def _news(self) -> list[PolicyUpdate]:
        """Per policy the newest update, if it is newer than what is promoted and was not decided against."""
        due = []
        for policy, (update, offset) in self._newest.items():
            promotion, promoted_at = self._promoted.get(policy, (None, -1))
            if promotion is not None:
                if update.version <= promotion.version:
                    continue
                if promotion.mode in DECIDED and offset < promoted_at:
                    continue
                if update.run_id == self._ended[policy]:
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
