"""The versions of a policy as `tentalis policy` shows them, folded from the log. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from schemas.ids import parse_policy_name, policy_name
from schemas.records import (
    AssignmentAck,
    EvalResult,
    Pin,
    PolicyAck,
    PolicyUpdate,
    Promotion,
    Record,
    RunManifest,
    StepResult,
)
from tentalis.policies.assignments import Assignments
from tentalis.policies.backpressure import Backpressure
from tentalis.policies.guard import CANDIDATE, LIVE
from tentalis.policies.lineage import Lineage, Node


class UnknownVersion(Exception):
    """No such `policy@vN` was published."""


@dataclass(slots=True)
class PolicyView:
    """The fold over runs, batches, policies, acknowledgements and verdicts; each topic is read in log order."""

    updates: dict[str, PolicyUpdate] = field(default_factory=dict)
    promotions: dict[str, list[Promotion]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    refusals: dict[str, dict[str, str]] = field(default_factory=dict)
    last_good: dict[tuple[str, str], int] = field(default_factory=dict)
    verdicts: dict[str, EvalResult] = field(default_factory=dict)
    results: dict[str, StepResult] = field(default_factory=dict)
    manifests: list[RunManifest] = field(default_factory=list)
    backpressure: Backpressure = field(default_factory=Backpressure)
    assignments: Assignments = field(default_factory=Assignments)
    holders: dict[str, dict[str, AssignmentAck]] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Applies a record."""
        match record:
            case PolicyUpdate():
                self.updates[record.name] = record
            case Promotion():
                self.promotions.setdefault(record.policy, []).append(record)
            case Pin():
                self.pins[record.name] = record
            case PolicyAck():
                refused = self.refusals.setdefault(record.name, {})
                if record.ok:
                    self.last_good[record.policy, record.server_id] = record.version
                    refused.pop(record.server_id, None)
                else:
                    refused[record.server_id] = record.error or "no reason given"
            case EvalResult() if record.experiment in (CANDIDATE, LIVE):
                self.verdicts[record.policy] = record
            case StepResult():
                self.results[policy_name(record.policy, record.policy_version)] = record
            case RunManifest():
                self.manifests.append(record)
            case AssignmentAck():
                self.holders.setdefault(record.name, {})[record.server_id] = record
            case _:
                self.assignments.apply(record)
                self.backpressure.apply(record)

    @property
    def policies(self) -> list[str]:
        """All policies that have a published version."""
        return sorted({update.policy for update in self.updates.values()})

    def find(self, name: str) -> PolicyUpdate:
        """The update of a `policy@vN`, or of the promoted version of a policy. Raises UnknownVersion."""
        if "@" not in name and name in self.promotions:
            name = self.promotions[name][-1].name
        if name in self.updates:
            return self.updates[name]
        versions = [known for known in self.updates if known.startswith(f"{name.partition('@')[0]}@")]
        hint = (
            f"the newest is {max(versions, key=lambda n: parse_policy_name(n)[1])}"
            if versions
            else (f"published policies: {', '.join(self.policies) or 'none'}")
        )
        raise UnknownVersion(f"no version {name!r} was published; {hint}")

    def lineage(self, policy: str) -> Lineage:
        """The lineage of the policy's runs."""
        return Lineage(manifest for manifest in self.manifests if manifest.policy == policy)

    def served_by(self, update: PolicyUpdate) -> list[str]:
        """The servers whose last good acknowledgement is of this version."""
        return sorted(
            s for (p, s), version in self.last_good.items() if (p, version) == (update.policy, update.version)
        )

    def assignment_rows(self) -> list[dict[str, Any]]:
        """The assignments in force: one row of `tentalis policy list` each."""
        rows = []
        for each in self.assignments:
            promoted = self.promotions.get(each.policy, [])
            name = each.name if each.version is not None or not promoted else promoted[-1].name
            acks = list(self.holders.get(name, {}).values())
            served = self.served_by(self.updates[name]) if name in self.updates else []
            rows.append(
                {
                    "scope": each.scope.value,
                    "subject": each.subject or None,
                    "tasks_of": each.replaces,
                    "answered_by": each.name,
                    "percent": each.percent,
                    "held_by": ",".join(sorted({*served, *(ack.server_id for ack in acks if ack.ok)})) or None,
                    "cannot_hold": {ack.server_id: ack.error or "no reason given" for ack in acks if not ack.ok},
                    "by": each.by,
                    "reason": each.reason,
                }
            )
        return rows

    def state(self, update: PolicyUpdate) -> str:
        """promoted, refused, abandoned (its run continued from an earlier version), candidate, or past."""
        promoted = self.promotions.get(update.policy, [])
        verdict = self.verdicts.get(update.name)
        if promoted and promoted[-1].version == update.version:
            return "promoted"
        if verdict is not None and verdict.passed is False:
            return "refused"
        lineage = self.lineage(update.policy)
        youngest = lineage.family(update.run_id)[-1]
        if youngest != update.run_id and update.step > lineage.behind(Node(youngest, 0)).get(update.run_id, -1):
            return "abandoned"
        return "past" if promoted and update.version < promoted[-1].version else "candidate"

    def row(self, update: PolicyUpdate) -> dict[str, Any]:
        """One line of `tentalis policy list`."""
        verdict = self.verdicts.get(update.name)
        return {
            "version": update.name,
            "run": update.run_id,
            "step": update.step,
            "state": self.state(update),
            "guard": None if verdict is None else "passed" if verdict.passed else "refused",
            "served_by": ",".join(self.served_by(update)) or None,
            "cannot_serve": ",".join(sorted(self.refusals.get(update.name, {}))) or None,
            "pinned": self.pinned(update.name),
            "assigned_to": [
                f"{each.scope.value} {each.subject}".rstrip()
                for each in self.assignments
                if each.policy == update.policy and each.version == update.version
            ],
            "sha256": update.sha256,
            "location": update.location,
            "published": update.event_time,
        }

    def pinned(self, name: str) -> bool:
        """True if the version is pinned: it is never deleted."""
        pin = self.pins.get(name)
        return pin is not None and pin.pinned

    def rows(self, policy: str | None, now_ms: int) -> Iterator[dict[str, Any]]:
        """The versions of a policy, or of all policies, newest first."""
        for name in self.policies if policy is None else [policy]:
            closed = self.backpressure.closed(name, now_ms)
            of_policy = (update for update in self.updates.values() if update.policy == name)
            for update in sorted(of_policy, key=lambda each: -each.version):
                yield self.row(update) | {"back_pressure": None if closed is None else closed.reason}

    def details(self, update: PolicyUpdate) -> dict[str, Any]:
        """Everything that is known about a version."""
        verdict, result = self.verdicts.get(update.name), self.results.get(update.name)
        promotions = [
            promotion for promotion in self.promotions.get(update.policy, []) if promotion.version == update.version
        ]
        lineage = self.lineage(update.policy)
        parent = lineage.parent(update.run_id)
        return self.row(update) | {
            "parent": None if parent is None else f"{parent.run}@{parent.step}",
            "base_model": update.base_model,
            "base_sha256": update.base_sha256,
            "rank": update.rank,
            "refusals": self.refusals.get(update.name, {}),
            "promotions": [{"mode": p.mode, "by": p.by, "reason": p.reason, "at": p.event_time} for p in promotions],
            "verdict": None if verdict is None else {"reasons": verdict.details, "metrics": verdict.metrics},
            "metrics": {} if result is None else result.metrics,
        }

    def difference(self, one: PolicyUpdate, other: PolicyUpdate) -> dict[str, Any]:
        """Compares two versions: steps between them, differing settings of their runs, metrics and verdicts side by
        side."""
        lineage = self.lineage(one.policy)
        steps = lineage.distance(Node(one.run_id, one.step), Node(other.run_id, other.step))
        metrics = [self._metrics_of(update) for update in (one, other)]
        configs = [flat_settings(self._config(update)) for update in (one, other)]
        return {
            "versions": [one.name, other.name],
            "same_weights": one.sha256 == other.sha256,
            "steps_between": steps,
            "metrics": sides(*metrics),
            "config": {k: v for k, v in sides(*configs).items() if v[0] != v[1] and k != "run_id"},
        }

    def _metrics_of(self, update: PolicyUpdate) -> dict[str, float]:
        result, verdict = self.results.get(update.name), self.verdicts.get(update.name)
        guard_metrics = {} if verdict is None else {f"guard_{name}": value for name, value in verdict.metrics.items()}
        return ({} if result is None else result.metrics) | guard_metrics

    def _config(self, update: PolicyUpdate) -> Any:
        mine = [manifest for manifest in self.manifests if manifest.run_id == update.run_id]
        return yaml.safe_load(mine[-1].config) if mine else {}

    def base_model(self, update: PolicyUpdate) -> str:
        """The base model as the configuration of the version's run names it (a folder, a name or a hub id), else its
        plain name."""
        return str(self._config(update).get("base_model") or update.base_model)

    def before(self, policy: str) -> PolicyUpdate:
        """The version promoted before the current one: the default target of a rollback.

        Compaction removes all promotions of a policy but the last. Without an earlier one on the log it is the newest
        earlier version that was neither refused nor abandoned. Raises UnknownVersion.
        """
        promoted = self.promotions.get(policy, [])
        now = self.updates.get(promoted[-1].name) if promoted else None
        earlier = [self.updates.get(promotion.name) for promotion in reversed(promoted)]
        versions = [update for update in self.updates.values() if update.policy == policy]
        for update in (*earlier, *sorted(versions, key=lambda each: each.version, reverse=True)):
            if update is not None and now is not None and update.sha256 != now.sha256 and self.state(update) == "past":
                return update
        raise UnknownVersion(
            f"the log does not show an earlier served version of {policy!r}: name the version to go back to"
        )


def flat_settings(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to names such as `optimizer.lr`."""
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {
        key: value for name, inner in values.items() for key, value in flat_settings(inner, f"{prefix}{name}.").items()
    }


def sides(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of both sides under each name; None where a side has none."""
    return {key: [one.get(key), other.get(key)] for key in sorted({*one, *other})}
