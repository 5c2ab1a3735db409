"""Published, promoted and acknowledged versions, and the decisions for one server. Pure: folded from the log."""

from collections.abc import Callable, Iterable

from schemas.ids import parse_policy_name, policy_name
from schemas.records import AssignmentAck, EvalResult, PolicyAck, PolicyUpdate, Promotion, Record, RunManifest
from tentalis.policies.assignments import Assignments
from tentalis.policies.guard import CANDIDATE, LIVE, BadGuard, GuardMode, GuardRule
from tentalis.policies.lineage import Lineage, Node
from tentalis.policies.newest import DECIDED_MODES, NewestVersions

KEPT_VERSIONS = 3


class PolicyLog:
    """The fold over tentalis.policies.v1, one server's acknowledgements and, for the guard, runs and verdicts."""

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        self._updates: dict[str, PolicyUpdate] = {}
        self._versions = NewestVersions()
        # Names of versions. Compaction keeps only the last promotion of a policy.
        self._once_promoted: set[str] = set()
        self._taken_back: set[str] = set()
        self._acked: dict[str, PolicyAck] = {}
        self._served_versions: dict[str, int] = {}
        self._rules: dict[str, GuardRule] = {}
        # By run, in order: from which time on its versions are published under a mode.
        self._modes: dict[str, list[tuple[int, GuardMode]]] = {}
        self._manifests: list[RunManifest] = []
        self._verdicts: dict[str, EvalResult] = {}
        self._assignments = Assignments()
        self._held: dict[str, AssignmentAck] = {}
        self.unruled: dict[str, str] = {}
        """Maps each run without a usable promotion rule in its manifest to the reason: only a person promotes it."""

    def apply(self, record: Record, offset: int) -> None:
        """Applies a record, in the log order of its topic. `offset` is its offset on that topic's single partition."""
        match record:
            case PolicyUpdate():
                self._updates[record.name] = record
                self._versions.apply(record, offset)
            case Promotion():
                self._versions.apply(record, offset)
                self._once_promoted.add(record.name)
                self._taken_back.discard(record.name)
                if record.mode in DECIDED_MODES:
                    known = self._updates.values()
                    later = (each for each in known if each.policy == record.policy and each.version > record.version)
                    self._taken_back.update(each.name for each in later)
            case PolicyAck() if record.server_id == self._server_id:
                self._acked[record.policy] = record
                if record.ok:
                    self._served_versions[record.policy] = record.version
            case AssignmentAck() if record.server_id == self._server_id:
                self._held[record.name] = record
            case RunManifest():
                self._manifest(record)
            case EvalResult() if record.experiment in (CANDIDATE, LIVE):
                self._verdicts[record.policy] = record
            case _:
                self._assignments.apply(record)

    def _manifest(self, manifest: RunManifest) -> None:
        self._manifests.append(manifest)
        try:
            self._rules[manifest.run_id] = GuardRule.of_config(manifest.config)
        except BadGuard as error:
            self._rules[manifest.run_id] = GuardRule(GuardMode.MANUAL)
            self.unruled[manifest.run_id] = str(error)
        mode = self._rules[manifest.run_id].mode
        self._modes.setdefault(manifest.run_id, []).append((manifest.event_time, mode))

    def due_promotions(self, *, always: bool = False) -> list[PolicyUpdate]:
        """Returns per policy the update to promote: its newest, if no later decision overrides it and it may be served;
        else the newest of its run that passed the guard. Newer versions may be published during a trial.

        An update may be served if its run has `promotion: always` or if it passed the guard. With `always=True` every
        update may. Two kinds of updates need neither: those with the weights that are promoted already (a branch begins
        with them), and the initial adapter of a policy that was never served, because it equals the base model.

        A promotion by hand and a rollback override all updates published before them. A rollback also overrides the
        update of the step that was in progress.
        """
        due = []
        for update in self._versions.all_undecided():
            if always or self._may_serve(update):
                due.append(update)
            elif update.policy not in self._versions.promotions and (first := self._initial(update.run_id)) is not None:
                # Further versions were published before the first decision.
                due.append(first)
            elif (tried := self._newest_passed(update)) is not None:
                due.append(tried)
        return due

    def _newest_passed(self, newest: PolicyUpdate) -> PolicyUpdate | None:
        """The newest version between the promoted one and the run's newest that passed the guard and that no decision
        took back; None if there is none."""
        promotion = self._versions.promotions.get(newest.policy)
        passed = (
            update
            for update in self._updates.values()
            if update.run_id == newest.run_id
            and self.rule(update).mode is GuardMode.GUARDED
            and (promotion is None or update.version > promotion.version)
            and update.name not in self._taken_back
            and self.passed(update.name)
        )
        return max(passed, key=lambda update: update.version, default=None)

    def untried(self) -> list[PolicyUpdate]:
        """Updates that the guard has to try: per policy the newest, if its run is guarded and it has no verdict."""
        return [
            update
            for update in self._versions.all_undecided()
            if self.rule(update).mode is GuardMode.GUARDED
            and not self._may_serve(update)
            and self.verdict(update.name) is None
        ]

    def refused(self) -> list[PolicyUpdate]:
        """Updates that failed the guard and that no rollback to the served version has followed yet."""
        newer = (update for update in self._versions.all_undecided() if update.policy in self._versions.promotions)
        return [update for update in newer if self.passed(update.name) is False and not self._may_serve(update)]

    def verdict(self, name: str) -> EvalResult | None:
        """The guard's latest verdict on `policy@vN`, or on a version with the same weights; None if there is none."""
        if name in self._verdicts or name not in self._updates:
            return self._verdicts.get(name)
        sha256 = self._updates[name].sha256
        same = (verdict for other, verdict in self._verdicts.items() if self._sha256(other) == sha256)
        return next(same, None)

    def passed(self, name: str) -> bool | None:
        """True if the guard allows `policy@vN` to be served, False if not, None without a verdict."""
        verdict = self.verdict(name)
        return None if verdict is None else verdict.passed

    def _sha256(self, name: str) -> str | None:
        return self._updates[name].sha256 if name in self._updates else None

    def rule(self, update: PolicyUpdate) -> GuardRule:
        """The promotion rule of the update's run; a run whose manifest has not been read yet promotes nothing."""
        return self._rules.get(update.run_id, GuardRule(GuardMode.MANUAL))

    def guarded(self) -> list[PolicyUpdate]:
        """The promoted updates whose run is guarded."""
        found = (self._updates.get(promotion.name) for promotion in self._versions.promotions.values())
        return [update for update in found if update is not None and self.rule(update).mode is GuardMode.GUARDED]

    def fallback(self, served: PolicyUpdate) -> PolicyUpdate | None:
        """The version to go back to from one that must no longer be served; None if there is none.

        It is the newest ancestor with other weights that was promoted. If compaction left none, it is the newest that
        passed the guard or was published while its run promoted every version; else the initial adapter from which the
        served version was trained. Versions that failed the guard or that a later decision took back are left out.
        A version that passed and was never promoted comes second, because its checkpoint may be pruned
        (`trainer.run.retention`).
        """
        lineage = Lineage(manifest for manifest in self._manifests if manifest.policy == served.policy)
        included_steps = lineage.behind(Node(served.run_id, served.step))
        ancestors = [
            update
            for update in self._updates.values()
            if update.policy == served.policy
            and update.version < served.version
            and update.step <= included_steps.get(update.run_id, -1)
            and update.sha256 != served.sha256
            and self.passed(update.name) is not False
            and update.name not in self._taken_back
        ]
        promoted = [update for update in ancestors if update.name in self._once_promoted]
        good = [update for update in ancestors if self.passed(update.name) or self._was_due(update)]
        initial = [update for update in ancestors if update.step == 0]
        return max(promoted or good or initial, key=lambda update: update.version, default=None)

    def _was_due(self, update: PolicyUpdate) -> bool:
        """True if the update was published while its run had `promotion: always`."""
        modes = [mode for since, mode in self._modes.get(update.run_id, []) if since <= update.event_time]
        return modes[-1:] == [GuardMode.ALWAYS]

    def _may_serve(self, update: PolicyUpdate) -> bool:
        rule, promotion = self._rules.get(update.run_id), self._versions.promotions.get(update.policy)
        if rule is None:
            return False
        same = promotion is not None and promotion.sha256 == update.sha256
        return (
            same
            or (promotion is None and update.step == 0 and self._initial(update.run_id) is not None)
            or rule.mode is GuardMode.ALWAYS
            or (rule.mode is GuardMode.GUARDED and self.passed(update.name) is True)
        )

    def equals_base(self, update: PolicyUpdate) -> bool:
        """True if a version has the weights of the base model: those of its run's untrained initial adapter."""
        initial = self._initial(update.run_id)
        return initial is not None and initial.sha256 == update.sha256 and self.rule(update).begins_with_base

    def _initial(self, run_id: str) -> PolicyUpdate | None:
        """The initial adapter of a run whose manifest was read; None for a branch: it begins with trained weights."""
        if {manifest.parent_run for manifest in self._manifests if manifest.run_id == run_id} != {None}:
            return None
        return next((u for u in self._updates.values() if u.run_id == run_id and u.step == 0), None)

    @property
    def policies(self) -> list[str]:
        """The policies that have a promoted version."""
        return sorted(self._versions.promotions)

    def promotion(self, policy: str) -> Promotion:
        """The promotion in force."""
        return self._versions.promotions[policy]

    def update(self, name: str) -> PolicyUpdate | None:
        """The published `policy@vN`, None if it is not on the log."""
        return self._updates.get(name)

    def kept_versions(self, policy: str) -> int:
        """The number of versions that a server keeps: those whose samples the policy's run may still train on, and at
        least KEPT_VERSIONS."""
        runs = [manifest.run_id for manifest in self._manifests if manifest.policy == policy]
        window = self._rules[runs[-1]].max_staleness + 1 if runs else 0
        return max(KEPT_VERSIONS, window)

    def candidates(self, policy: str) -> list[str]:
        """The names that the server may serve, best first: the promoted version, then the last that it acknowledged."""
        names = [self.promotion(policy).name]
        if (
            policy in self._served_versions
            and (served := policy_name(policy, self._served_versions[policy])) not in names
        ):
            names.append(served)
        return names

    def served_version(self, policy: str) -> int | None:
        """The version that the server last acknowledged as served, None if there is none."""
        return self._served_versions.get(policy)

    def assigned(self) -> list[str]:
        """The `policy@vN` that are assigned by number: the server holds them beside what it serves."""
        return self._assignments.names()

    def holds(self, name: str) -> bool:
        """True if the server's last acknowledgement of the assigned `policy@vN` is that it holds it."""
        ack = self._held.get(name)
        return ack is not None and ack.ok

    def acknowledged(self, name: str) -> bool:
        """True if the server's last acknowledgement for this policy is that it serves `name`."""
        ack = self._acked.get(parse_policy_name(name)[0])
        return ack is not None and ack.ok and ack.name == name


def versions_held(max_staleness: int) -> int:
    """Returns the most versions of a policy that a server holds at the same time: those that it keeps, the candidate
    that the guard tries, and the one that is loaded next."""
    return max(KEPT_VERSIONS, max_staleness + 1) + 2


def surplus(
    loaded: Iterable[str], serving: Iterable[str], kept_versions: Callable[[str], int] = lambda policy: KEPT_VERSIONS
) -> list[str]:
    """The loaded adapters to unload: all but those being served and the newest of each policy, as many as
    `kept_versions` says. Models that are not named `policy@vN` are ignored.
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
        for version in sorted(versions, reverse=True)[kept_versions(policy) :]
        if (name := policy_name(policy, version)) not in kept
    ]
