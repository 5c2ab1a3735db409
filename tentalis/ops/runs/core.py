"""The runs on the log: their steps, settings, versions and digests. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from schemas.records import BatchPlan, PolicyUpdate, Record, RunManifest, StepResult
from tentalis.policies.view import PolicyView, flat_settings, sides

CURVES = ("reward_mean", "rl_loss", "opd_loss", "grad_norm", "entropy", "mismatch_kl")
"""Metrics of a step that a comparison shows, where the runs have them."""
ENDS = 5
"""Steps of the mean at the end of a curve."""
ENVIRONMENT = ("base_sha256", "tokenizer_sha256", "device", "instruction_set", "threads", "world_size")


class UnknownRunId(Exception):
    """The log has no manifest of a run."""


@dataclass(slots=True)
class RunHistory:
    """One run. `manifests` in log order; `plans` by step and attempt; `results`: of each step, the last one written."""

    run_id: str
    manifests: list[RunManifest] = field(default_factory=list)
    plans: dict[tuple[int, int], BatchPlan] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        return self.manifests[0].policy

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the newest manifest, with names such as `optimizer.lr`."""
        return flat_settings(yaml.safe_load(self.manifests[-1].config))

    @property
    def parent(self) -> str | None:
        """The step that the run continues, such as `run-1@4`; None for a run from the initial adapter."""
        first = self.manifests[0]
        return None if first.parent_run is None else f"{first.parent_run}@{first.parent_step}"

    @property
    def last_step(self) -> int:
        return max(self.results, default=0)

    def trained_plan(self, step: int) -> BatchPlan | None:
        """The plan whose result counts; None for the first step, which has no plan."""
        result = self.results[step]
        plan = self.plans.get((step, result.attempt))
        return plan if plan is not None and plan.plan_id == result.plan_id else None

    def trained_plans(self) -> Iterator[BatchPlan]:
        """Yields the trained plans, by step."""
        for step in sorted(self.results):
            plan = self.trained_plan(step)
            if plan is not None:
                yield plan

    def trained_rollouts(self) -> dict[str, str]:
        """Returns the digests of the rollouts that the run trained on, by their ids."""
        return {row.rollout_id: row.digest for plan in self.trained_plans() for row in plan.rows}

    def drops(self) -> dict[str, int]:
        """Returns the number of rollouts that the trained plans left out, by reason."""
        found: Counter[str] = Counter()
        for plan in self.trained_plans():
            for drop in plan.drops:
                found[drop.reason] += drop.count
        return dict(sorted(found.items()))

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Returns the values of a metric, by step."""
        return [(s, r.metrics[metric]) for s, r in sorted(self.results.items()) if metric in r.metrics]


class RunsView:
    """The fold over runs, batches, policies and acknowledgements; each topic is read in log order."""

    def __init__(self) -> None:
        self.versions = PolicyView()
        self._runs: dict[str, RunHistory] = {}

    def apply(self, record: Record) -> None:
        """Applies a record."""
        self.versions.apply(record)
        match record:
            case RunManifest():
                self._run(record.run_id).manifests.append(record)
            case BatchPlan():
                self._run(record.run_id).plans[record.step, record.attempt] = record
            case StepResult():
                self._run(record.run_id).results[record.step] = record

    def _run(self, run_id: str) -> RunHistory:
        return self._runs.setdefault(run_id, RunHistory(run_id))

    @property
    def runs(self) -> list[RunHistory]:
        """The runs with a manifest, the newest first."""
        known = [run for run in self._runs.values() if run.manifests]
        return sorted(known, key=lambda run: (-run.manifests[0].event_time, run.run_id))

    def find(self, run_id: str) -> RunHistory:
        """Returns a run. Raises UnknownRunId."""
        run = self._runs.get(run_id)
        if run is None or not run.manifests:
            names = ", ".join(each.run_id for each in self.runs) or "none"
            raise UnknownRunId(f"the log has no run {run_id!r}; runs: {names}")
        return run

    def updates(self, run: RunHistory) -> list[PolicyUpdate]:
        """Returns the versions that a run published, the oldest first."""
        own = (update for update in self.versions.updates.values() if update.run_id == run.run_id)
        return sorted(own, key=lambda update: update.version)

    def children(self, run: RunHistory) -> dict[str, int]:
        """Returns the runs that continue this one, with the step from which each does."""
        found = {}
        for other in self.runs:
            first = other.manifests[0]
            if first.parent_run == run.run_id and first.parent_step is not None:
                found[other.run_id] = first.parent_step
        return found

    def is_counterfactual(self, run: RunHistory) -> bool:
        """True for a run under another policy name than its parent's: it is never served."""
        parent = self._runs.get(run.manifests[0].parent_run or "")
        return parent is not None and bool(parent.manifests) and parent.policy != run.policy

    def row(self, run: RunHistory) -> dict[str, Any]:
        """One line of `tentalis runs list`."""
        updates, last = self.updates(run), run.results.get(run.last_step)
        return {
            "run": run.run_id,
            "policy": run.policy,
            "parent": run.parent,
            "counterfactual": self.is_counterfactual(run),
            "steps": run.last_step,
            "versions": f"v{updates[0].version}-v{updates[-1].version}" if updates else None,
            "rollouts": sum(len(plan.rows) for plan in run.trained_plans()),
            "dropped": sum(run.drops().values()),
            "reward": None if last is None else last.metrics.get("reward_mean"),
            "began": run.manifests[0].event_time,
            "last_result": None if last is None else last.event_time,
        }

    def details(self, run: RunHistory) -> dict[str, Any]:
        """Everything that the log says about a run."""
        newest = run.manifests[-1]
        steps = []
        for step, result in sorted(run.results.items()):
            plan = run.trained_plan(step)
            steps.append(
                {
                    "step": step,
                    "attempt": result.attempt,
                    "version": result.policy_version,
                    "rollouts": 0 if plan is None else len(plan.rows),
                    "at": result.event_time,
                    "sha256": result.adapter_sha256,
                    "metrics": dict(result.metrics),
                }
            )
        return self.row(run) | {
            "manifests": len(run.manifests),
            "base_model": newest.base_model,
            "environment": {name: getattr(newest, name) for name in ENVIRONMENT} | {"versions": newest.versions},
            "settings": run.settings,
            "drops": run.drops(),
            "continued_by": {name: f"from step {step}" for name, step in sorted(self.children(run).items())},
            "steps_trained": steps,
            "published": [self.versions.row(update) for update in self.updates(run)],
        }

    def compare(self, one: RunHistory, other: RunHistory) -> dict[str, Any]:
        """Compares two runs: differing settings and environments, ends of their curves, rollouts, and digests of the
        steps that both have."""
        settings = {name: pair for name, pair in sides(one.settings, other.settings).items() if pair[0] != pair[1]}
        rollouts = [run.trained_rollouts() for run in (one, other)]
        shared = rollouts[0].keys() & rollouts[1].keys()
        return {
            "runs": [one.run_id, other.run_id],
            "policies": [one.policy, other.policy],
            "parents": [one.parent, other.parent],
            "steps": [one.last_step, other.last_step],
            "settings": {name: pair for name, pair in settings.items() if name not in ("run_id", "policy")},
            "environment": _environment(one, other),
            "curves": _curves(one, other),
            "rollouts": {
                "both": len(shared),
                "only": [len(each) - len(shared) for each in rollouts],
                "other_content": sum(rollouts[0][key] != rollouts[1][key] for key in shared),
            },
            "digests": _digests(one, other),
        }


def _environment(one: RunHistory, other: RunHistory) -> dict[str, list[Any]]:
    """Returns what the bytes of a run depend on besides its settings, where the newest manifests differ."""
    facts = [
        {name: getattr(run.manifests[-1], name) for name in ENVIRONMENT}
        | {f"versions.{name}": version for name, version in run.manifests[-1].versions.items()}
        for run in (one, other)
    ]
    return {name: pair for name, pair in sides(*facts).items() if pair[0] != pair[1]}


def _curves(one: RunHistory, other: RunHistory) -> dict[str, dict[str, list[float | None]]]:
    """Returns first value, last value and the mean of the last steps of each metric that one of the runs has."""
    found = {}
    for metric in CURVES:
        values = [[value for _, value in run.curve(metric)] for run in (one, other)]
        if any(values):
            found[metric] = {
                "first": [each[0] if each else None for each in values],
                "last": [each[-1] if each else None for each in values],
                f"mean_of_last_{ENDS}": [_mean(each[-ENDS:]) for each in values],
            }
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _digests(one: RunHistory, other: RunHistory) -> dict[str, Any]:
    """Returns how many steps that both runs have end with the same adapter, and the first that does not."""
    steps = sorted(one.results.keys() & other.results.keys())
    differing = [s for s in steps if one.results[s].adapter_sha256 != other.results[s].adapter_sha256]
    return {
        "compared": len(steps),
        "equal": len(steps) - len(differing),
        "first_difference": differing[0] if differing else None,
    }
