"""What there is of a policy's versions, for people: folded from the log. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from schemas.ids import parse_policy_name
from schemas.records import (
    EvalResult,
    Pin,
    PolicyAck,
    PolicyUpdate,
    Promotion,
    Record,
    RunManifest,
    StepResult,
)
from tentalis.guard import CANDIDATE, LIVE
from tentalis.lineage import Lineage, Node
from tentalis.pressure import Pressure


class UnknownVersion(Exception):
    """No such `policy@vN` was published."""


@dataclass(slots=True)
class View:
    """The fold over runs, batches, policies, acknowledgements and verdicts, each topic in its order."""

    updates: dict[str, PolicyUpdate] = field(default_factory=dict)
    promotions: dict[str, list[Promotion]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    refusals: dict[str, dict[str, str]] = field(default_factory=dict)
    good: dict[tuple[str, str], int] = field(default_factory=dict)
    verdicts: dict[str, EvalResult] = field(default_factory=dict)
    results: dict[str, StepResult] = field(default_factory=dict)
    manifests: list[RunManifest] = field(default_factory=list)
    pressure: Pressure = field(default_factory=Pressure)

    def apply(self, record: Record) -> None:
        """Takes in a record."""
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
                    self.good[record.policy, record.server_id] = record.version
                    refused.pop(record.server_id, None)
                else:
                    refused[record.server_id] = record.error or "no reason given"
            case EvalResult() if record.experiment in (CANDIDATE, LIVE):
                self.verdicts[record.policy] = record
            case StepResult():
                self.results[f"{record.policy}@v{record.policy_version}"] = record
            case RunManifest():
                self.manifests.append(record)
            case _:
                self.pressure.apply(record)

    @property
    def policies(self) -> list[str]:
        """All policies of which some version was published."""
        return sorted({update.policy for update in self.updates.values()})

    def named(self, name: str) -> PolicyUpdate:
        """The update of a `policy@vN`, or of a policy's version that should be served. Raises UnknownVersion."""
        if "@" not in name and name in self.promotions:
            name = self.promotions[name][-1].name
        if name in self.updates:
            return self.updates[name]
        near = [known for known in self.updates if known.startswith(f"{name.partition('@')[0]}@")]
        there = (
            f"the newest is {max(near, key=lambda n: parse_policy_name(n)[1])}"
            if near
            else (f"policies there: {', '.join(self.policies) or 'none'}")
        )
        raise UnknownVersion(f"no version {name!r} was published; {there}")

    def lineage(self, policy: str) -> Lineage:
        """Of the policy's runs."""
        return Lineage(manifest for manifest in self.manifests if manifest.policy == policy)

    def served_by(self, update: PolicyUpdate) -> list[str]:
        """Servers whose last good acknowledgement is of this version."""
        return sorted(s for (p, s), version in self.good.items() if (p, version) == (update.policy, update.version))

    def state(self, update: PolicyUpdate) -> str:
        """promoted, refused, abandoned (its run went on from an earlier version), candidate, or past."""
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
            "sha256": update.sha256,
            "location": update.location,
            "published": update.event_time,
        }

    def pinned(self, name: str) -> bool:
        """Whether it is kept for good."""
        pin = self.pins.get(name)
        return pin is not None and pin.pinned

    def rows(self, policy: str | None, now_ms: int) -> Iterator[dict[str, Any]]:
        """The versions of a policy, or of all, the newest first."""
        for name in self.policies if policy is None else [policy]:
            pressed = self.pressure.closed(name, now_ms)
            mine = (update for update in self.updates.values() if update.policy == name)
            for update in sorted(mine, key=lambda each: -each.version):
                yield self.row(update) | {"back_pressure": None if pressed is None else pressed.reason}

    def details(self, update: PolicyUpdate) -> dict[str, Any]:
        """All that is known of a version."""
        verdict, result = self.verdicts.get(update.name), self.results.get(update.name)
        promotions = [each for each in self.promotions.get(update.policy, []) if each.version == update.version]
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
        """What two versions differ in: steps between them, settings of their runs, metrics and verdicts side by
        side."""
        lineage = self.lineage(one.policy)
        steps = lineage.distance(Node(one.run_id, one.step), Node(other.run_id, other.step))
        metrics = [self._measured(update) for update in (one, other)]
        configs = [_flat(self._config(update)) for update in (one, other)]
        return {
            "versions": [one.name, other.name],
            "same_weights": one.sha256 == other.sha256,
            "steps_between": steps,
            "metrics": _sides(*metrics),
            "config": {k: v for k, v in _sides(*configs).items() if v[0] != v[1] and k != "run_id"},
        }

    def _measured(self, update: PolicyUpdate) -> dict[str, float]:
        result, verdict = self.results.get(update.name), self.verdicts.get(update.name)
        said = {} if verdict is None else {f"guard_{name}": value for name, value in verdict.metrics.items()}
        return ({} if result is None else result.metrics) | said

    def _config(self, update: PolicyUpdate) -> Any:
        mine = [manifest for manifest in self.manifests if manifest.run_id == update.run_id]
        return yaml.safe_load(mine[-1].config) if mine else {}

    def before(self, policy: str) -> PolicyUpdate:
        """What was served before what should be served now: where a rollback goes by itself. Raises UnknownVersion."""
        promoted = self.promotions.get(policy, [])
        now = self.updates.get(promoted[-1].name) if promoted else None
        for promotion in reversed(promoted):
            update = self.updates.get(promotion.name)
            if update is not None and now is not None and update.sha256 != now.sha256 and self.state(update) == "past":
                return update
        raise UnknownVersion(
            f"the log does not tell what of {policy!r} was served before: name the version to go back to"
        )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {key: value for name, inner in values.items() for key, value in _flat(inner, f"{prefix}{name}.").items()}


def _sides(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: [one.get(key), other.get(key)] for key in sorted({*one, *other})}
