"""Lag in learning units: rollouts that wait for training, and the time until a complaint reaches the served policy.

The time is a sum of five stages, each from what is on the topics (docs/operations/consumer-groups.md has the exact
definitions). A stage that cannot be known makes the sum unknown, with the reason. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import yaml

from schemas.records import BatchPlan, PolicyAck, Position, Record, Rollout, RunManifest, StepResult
from tentalis.policies.lineage import Lineage

RECENT_STEPS = 5
WINDOW_MS = 10 * 60_000
"""The time over which the arrival of rollouts is counted."""

Place = tuple[int, int]
"""Partition and offset of a rollout."""


@dataclass(slots=True)
class TrainingLog:
    """The fold over the control topics: what training did, per run and policy. Records of one topic come in log
    order."""

    manifests: list[RunManifest] = field(default_factory=list)
    plans: dict[tuple[str, int, int], BatchPlan] = field(default_factory=dict)
    results: dict[tuple[str, int], StepResult] = field(default_factory=dict)
    acks: dict[tuple[str, str], PolicyAck] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Applies a record."""
        match record:
            case RunManifest():
                self.manifests.append(record)
            case BatchPlan():
                self.plans[record.run_id, record.step, record.attempt] = record
            case StepResult():
                self.results[record.run_id, record.step] = record
            case PolicyAck(ok=True):
                self.acks[record.server_id, record.policy] = record

    @property
    def policies(self) -> list[str]:
        """The policies that are trained to be served. A counterfactual trains another policy, which is not served."""
        owner = {manifest.run_id: manifest.policy for manifest in self.manifests}
        return sorted(
            {
                manifest.policy
                for manifest in self.manifests
                if owner.get(manifest.parent_run or "", manifest.policy) == manifest.policy
            }
        )

    def training_of(self, policy: str) -> PolicyTraining:
        """Returns the state of training of one policy: that of its newest run."""
        manifests = [manifest for manifest in self.manifests if manifest.policy == policy]
        run = Lineage(manifests).runs[-1]
        own = [manifest for manifest in manifests if manifest.run_id == run]
        plans = sorted(
            (plan for plan in self.plans.values() if plan.run_id == run), key=lambda plan: (plan.step, plan.attempt)
        )
        trained: list[tuple[BatchPlan, StepResult]] = []
        for plan in plans:
            result = self.results.get((run, plan.step))
            if result is not None and result.plan_id == plan.plan_id:
                trained.append((plan, result))
        positions = plans[-1].low_water if plans else own[0].start
        acks = [ack for ack in self.acks.values() if ack.policy == policy]
        return PolicyTraining(
            policy,
            promotion=str(_config(own[-1]).get("promotion", "always")),
            low_water=_by_partition(positions),
            under_way=bool(plans) and not (trained and trained[-1][0] is plans[-1]),
            recent=trained[-RECENT_STEPS:],
            results={r.policy_version: r for r in self.results.values() if r.policy == policy},
            acks=acks,
        )


@dataclass(frozen=True, slots=True)
class PolicyTraining:
    """Training of one policy. `low_water`: per partition, the first offset of rollouts that no plan has considered.
    `under_way`: the newest plan has no result yet. `recent`: the last trained plans with their results."""

    policy: str
    promotion: str
    low_water: Mapping[int, int]
    under_way: bool
    recent: Sequence[tuple[BatchPlan, StepResult]]
    results: Mapping[int, StepResult]
    acks: Sequence[PolicyAck]

    @property
    def batch_rollouts(self) -> int | None:
        """The median number of rollouts of the recent plans."""
        return round(median(len(plan.rows) for plan, _ in self.recent)) if self.recent else None

    @property
    def step_s(self) -> float | None:
        """The median time from plan to result of the recent steps, in seconds."""
        if not self.recent:
            return None
        return max(0.0, median(result.event_time - plan.event_time for plan, result in self.recent) / 1000)

    @property
    def newest_rows(self) -> list[Place]:
        """The places of the rollouts of the newest trained plan."""
        return [(row.partition, row.offset) for row in self.recent[-1][0].rows] if self.recent else []

    def serve_s(self, now_ms: int) -> tuple[float | None, str]:
        """Returns the seconds from the result of a step to the first acknowledgement of its version, measured at the
        newest acknowledged version, and the reason if it is unknown.

        If a newer version waits for longer than that, its waiting time so far is returned.
        """
        if self.promotion == "manual":
            return None, "versions wait for `tentalis policy promote` (promotion: manual)"
        known = [ack for ack in self.acks if ack.version in self.results]
        if not known:
            return None, "no server has acknowledged a version of this policy"
        served = max(ack.version for ack in known)
        first = min(ack.event_time for ack in known if ack.version == served)
        took = max(0, first - self.results[served].event_time)
        newer = [result.event_time for version, result in self.results.items() if version > served]
        waited = max(0, now_ms - min(newer)) if newer else 0
        return max(took, waited) / 1000, ""


def _config(manifest: RunManifest) -> dict[str, Any]:
    found = yaml.safe_load(manifest.config)
    return found if isinstance(found, dict) else {}


def _by_partition(positions: Iterable[Position]) -> dict[int, int]:
    return {position.partition: position.offset for position in positions}


@dataclass(slots=True)
class WaitingRollouts:
    """Counts the rollouts of a policy: those that wait for training, and those that came within the window."""

    policy: str
    low_water: Mapping[int, int]
    since_ms: int
    waiting: int = 0
    arrived: int = 0

    def add(self, rollout: Rollout, partition: int, offset: int, timestamp: int) -> None:
        """Counts one record of the rollouts topic. Redacted rollouts are not trained on."""
        if rollout.head.policy != self.policy or rollout.forgotten:
            return
        self.waiting += offset >= self.low_water.get(partition, 0)
        self.arrived += timestamp >= self.since_ms

    @property
    def per_second(self) -> float:
        """Rollouts per second within the window."""
        return self.arrived / (WINDOW_MS / 1000)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage between a complaint and the served policy that learned from it: seconds, or None and the reason why
    they are unknown."""

    name: str
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LearningLag:
    """The lag of a policy in learning units."""

    policy: str
    rollouts: int
    stages: tuple[Stage, ...]

    @property
    def minutes(self) -> float | None:
        """Minutes until a complaint that is written now reaches the served policy; None if a stage is unknown."""
        seconds = [stage.seconds for stage in self.stages]
        known = [each for each in seconds if each is not None]
        return sum(known) / 60 if len(known) == len(seconds) else None

    @property
    def reason(self) -> str:
        """The reasons why the minutes are unknown; "" if they are known."""
        return "; ".join(dict.fromkeys(stage.reason for stage in self.stages if stage.seconds is None))


def batch_wait(waiting: int, batch: int, step_s: float, per_second: float, *, under_way: bool) -> float | None:
    """Returns the seconds until the plan that contains a rollout which arrives now; None if its batch never fills.

    Ahead of it are the step under way and the full batches of the `waiting` rollouts; its own batch needs the rest.
    """
    ahead = waiting // batch * step_s + (step_s if under_way else 0.0)
    missing = batch - 1 - waiting % batch
    if not missing:
        return ahead
    return max(ahead, missing / per_second) if per_second > 0 else None


def learning_lag(
    training: PolicyTraining,
    waiting: WaitingRollouts,
    stages_before: Sequence[Stage],
    now_ms: int,
    *,
    trainer_active: bool,
) -> LearningLag:
    """Returns the learning lag. `stages_before`: the stages up to the rollout."""
    step_s, batch = training.step_s, training.batch_rollouts
    if not trainer_active:
        wait = Stage("batch", None, f"no trainer of {training.policy} runs")
    elif step_s is None or batch is None:
        wait = Stage("batch", None, f"the newest run of {training.policy} has trained no step yet")
    else:
        seconds = batch_wait(waiting.waiting, batch, step_s, waiting.per_second, under_way=training.under_way)
        wait = Stage("batch", seconds, "" if seconds is not None else "no rollout came within the last 10 minutes")
    step = Stage("step", step_s, "" if step_s is not None else wait.reason or "no step was trained yet")
    return LearningLag(
        training.policy,
        waiting.waiting,
        (*stages_before, wait, step, Stage("serve", *training.serve_s(now_ms))),
    )


def stages_to_rollout(
    ages: Mapping[str, float | None], inactive: Iterable[str], joined_s: float | None
) -> tuple[Stage, Stage]:
    """Returns the stages `halves` (scoring and hinting) and `join`.

    Args:
        ages: per application, the age of the oldest unread record in seconds; None if it has never run.
        inactive: applications without members.
        joined_s: the median time of recent rollouts in the join; None if there is none.
    """
    down = set(inactive)

    def stage(name: str, applications: Sequence[str], more: float | None, missing: str) -> Stage:
        stopped = [each for each in applications if each in down or ages.get(each) is None]
        if stopped:
            return Stage(name, None, f"{' and '.join(stopped)} {'do' if len(stopped) > 1 else 'does'} not run")
        if more is None:
            return Stage(name, None, missing)
        return Stage(name, max(ages[each] or 0.0 for each in applications) + more)

    return (
        stage("halves", ("scoring", "hinting"), 0.0, ""),
        stage("join", ("join",), joined_s, "no trained rollout shows how long the join takes"),
    )
