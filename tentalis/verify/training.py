"""Rules about training: nothing trained twice in a lineage, nothing left out silently, every step answered for."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from schemas.digest import record_digest
from schemas.ids import parse_policy_name
from schemas.records import BatchPlan, PolicyUpdate, Rollout, RunManifest, StepResult
from tentalis.lineage import Lineage
from tentalis.verify.index import Index
from tentalis.verify.model import Kind, Log, Problem


@dataclass(frozen=True)
class Training:
    """The runs as the batches topic tells them; `winners` maps run -> step -> the plan that was trained."""

    run: str
    manifests: dict[str, list[RunManifest]]
    plans: dict[tuple[str, int], dict[int, BatchPlan]]
    steps: dict[tuple[str, int], list[StepResult]]
    winners: dict[str, dict[int, BatchPlan]]

    @classmethod
    def of(cls, log: Log) -> "Training":
        manifests: dict[str, list[RunManifest]] = defaultdict(list)
        for manifest in log.manifests:
            manifests[manifest.record.run_id].append(manifest.record)
        plans: dict[tuple[str, int], dict[int, BatchPlan]] = defaultdict(dict)
        for plan in log.plans:
            plans[plan.record.run_id, plan.record.step].setdefault(plan.record.attempt, plan.record)
        steps: dict[tuple[str, int], list[StepResult]] = defaultdict(list)
        for step in log.steps:
            steps[step.record.run_id, step.record.step].append(step.record)
        winners: dict[str, dict[int, BatchPlan]] = defaultdict(dict)
        for (run, step_number), results in steps.items():
            plan_of = plans.get((run, step_number), {}).get(results[0].attempt)
            if plan_of is not None:
                winners[run][step_number] = plan_of
        return cls(log.run, dict(manifests), dict(plans), dict(steps), dict(winners))

    @cached_property
    def lineage(self) -> Lineage:
        """Which run goes on from which."""
        return Lineage(manifest for found in self.manifests.values() for manifest in found)

    @cached_property
    def fates(self) -> "Fates":
        """What became of the rollouts."""
        return Fates(self)

    def leaves(self) -> list[str]:
        """The youngest runs that go on from this one: itself, if none does."""
        lineage = self.lineage
        heirs = [run for run in lineage.runs if self.run in lineage.path(run)]
        parents = {parent.run for run in lineage.runs if (parent := lineage.parent(run)) is not None}
        return [run for run in heirs if run not in parents] or [self.run]

    def considered(self, run: str) -> dict[int, tuple[int, int]]:
        """By partition, the first offset that a run read, and the first that none of its steps considered."""
        manifests, steps = self.manifests.get(run, []), self.winners.get(run, {})
        start = {at.partition: at.offset for at in manifests[0].start} if manifests else {}
        low_water = {at.partition: at.offset for at in steps[max(steps)].low_water} if steps else start
        return {p: (start.get(p, 0), low_water.get(p, 0)) for p in start.keys() | low_water.keys()}

    def open_steps(self) -> list[int]:
        """Steps of the run that are planned and not done."""
        return sorted(step for run, step in self.plans if run == self.run and (run, step) not in self.steps)


def nothing_is_trained_twice(index: Index, training: Training) -> Iterator[Problem]:
    """A rollout is in at most one plan that was trained, over a run and everything that it goes on from."""
    reported, lineage = set(), training.lineage
    for leaf in training.leaves():
        trained: dict[str, list[str]] = defaultdict(list)
        for run in lineage.path(leaf):
            for step, plan in sorted(training.winners.get(run, {}).items()):
                for row in plan.rows:
                    trained[row.rollout_id].append(f"{run}/{step}")
        for rollout_id, steps in trained.items():
            if len(steps) > 1 and (rollout_id, *steps) not in reported:
                reported.add((rollout_id, *steps))
                yield Problem(Kind.DUPLICATE, "trained-twice", rollout_id, f"in the steps {', '.join(steps)}")


class Fates:
    """What became of the rollouts: all that a run and its family trained, dropped and read, gone through once."""

    def __init__(self, training: Training) -> None:
        family = training.lineage.family(training.run)
        plans = [plan for run in family for plan in training.winners.get(run, {}).values()]
        dropped: dict[int, list[tuple[int, int]]] = defaultdict(list)
        passed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for drop in (drop for plan in plans for drop in plan.drops):
            dropped[drop.partition].append((drop.first_offset, drop.last_offset + 1))
        for partition, offsets in (item for run in family for item in training.considered(run).items()):
            passed[partition].append(offsets)
        self._trained = {row.rollout_id for plan in plans for row in plan.rows}
        self._dropped = {partition: _merged(ranges) for partition, ranges in dropped.items()}
        self._passed = {partition: _merged(ranges) for partition, ranges in passed.items()}

    def of(self, rollout: Rollout, partition: int, offset: int) -> str | None:
        """trained, dropped, ahead (not reached yet), or None: left out silently. What an abandoned branch trained, its
        siblings leave out."""
        if rollout.rollout_id in self._trained:
            return "trained"
        if _covered(self._dropped.get(partition, ()), offset):
            return "dropped"
        return None if _covered(self._passed.get(partition, ()), offset) else "ahead"


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, without overlaps."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _covered(merged: Sequence[tuple[int, int]], offset: int) -> bool:
    before = bisect_right(merged, offset, key=lambda each: each[0])
    return before > 0 and offset < merged[before - 1][1]


def rollouts_are_used(index: Index, training: Training) -> Iterator[Problem]:
    """Every rollout of the trained policy was trained, or dropped with a reason, or lies ahead of the low-water."""
    policies = {manifest.policy for manifest in training.manifests.get(training.run, ())}
    for key, copies in index.rollouts.items():
        first = copies[0]
        if first.record.head.policy not in policies or index.dead(copies):
            continue
        if training.fates.of(first.record, first.partition, first.offset) is None:
            message = f"{first} is below the low-water, but in no plan and in no drop"
            yield Problem(Kind.LOST, "untrained-rollout", key, message)


def drops_say_how_many(index: Index, training: Training) -> Iterator[Problem]:
    """The drops of a plan stand for at least as many records as lie in their ranges and were not trained: a range over
    which neighbouring drops were drawn together hides nothing that was lost."""
    policies = {manifest.policy for manifest in training.manifests.get(training.run, ())}
    plans = training.winners.get(training.run, {})
    rows = {(row.partition, row.offset) for plan in plans.values() for row in plan.rows}
    untrained: dict[int, list[int]] = defaultdict(list)
    for copy in (copy for copies in index.rollouts.values() for copy in copies):
        known = copy.record.head.policy in policies and copy.place not in index.log.dead
        if known and (copy.partition, copy.offset) not in rows:
            untrained[copy.partition].append(copy.offset)
    for offsets in untrained.values():
        offsets.sort()
    for step, plan in sorted(plans.items()):
        for partition in sorted({drop.partition for drop in plan.drops}):
            drops = [drop for drop in plan.drops if drop.partition == partition]
            ranges = _merged((drop.first_offset, drop.last_offset + 1) for drop in drops)
            lying = untrained[partition]
            covered = sum(bisect_left(lying, end) - bisect_left(lying, start) for start, end in ranges)
            stated = sum(drop.count for drop in drops)
            if covered > stated:
                message = f"its drops on partition {partition} count {stated} records, but {covered} lie there"
                yield Problem(Kind.LOST, "drop-count", f"{training.run}/{step}", message)


def plans_name_what_is_there(index: Index, training: Training) -> Iterator[Problem]:
    """Every row of a trained plan is a rollout on the topic, with its digest and with the parts that train."""
    ids = set(index.tasks)
    for step, plan in sorted(training.winners.get(training.run, {}).items()):
        for row in plan.rows:
            where = f"{training.run}/{step} {row.rollout_id}"
            copies = index.rollouts.get(row.rollout_id)
            if copies is None:
                if any(row.rollout_id.startswith(f"{task_id}/") for task_id in ids):
                    yield Problem(Kind.LOST, "missing-rollout", where, "planned, but not on the rollouts topic")
                continue
            rollout = copies[0].record
            if row.digest != rollout.digest:
                yield Problem(
                    Kind.WRONG, "forged-rollout", where, f"planned as {row.digest}, recorded {rollout.digest}"
                )
            elif not rollout.forgotten and ((row.rl and not rollout.has_rl) or (row.opd and not rollout.has_opd)):
                yield Problem(Kind.WRONG, "plan-row", where, "a part trains that the rollout does not have")
            elif not rollout.forgotten and row.n_tokens != rollout.n_tokens:
                yield Problem(Kind.WRONG, "plan-row", where, f"{row.n_tokens} tokens, but it has {rollout.n_tokens}")
            # Compaction keeps the last copy only; the place is where the rollout was seen, the key is what it is.
            there = any((copy.partition, copy.offset) == (row.partition, row.offset) for copy in copies)
            if not there and all(copy.offset < row.offset for copy in copies):
                message = f"planned as seen at {row.partition}@{row.offset}, where it never was"
                yield Problem(Kind.WRONG, "plan-row", where, message)
        if any(row.rank >= plan.world_size for row in plan.rows):
            yield Problem(Kind.WRONG, "plan-row", f"{training.run}/{step}", f"a rank beyond {plan.world_size}")


def manifests_hold(index: Index, training: Training) -> Iterator[Problem]:
    """Every plan was made under a manifest that is on the topic, unaltered."""
    manifests = training.manifests.get(training.run, [])
    for manifest in manifests:
        if record_digest(manifest, {"digest", "event_time"}) != manifest.digest:
            yield Problem(Kind.WRONG, "manifest-altered", manifest.key, "its content is not what its digest says")
    known = {manifest.digest for manifest in manifests}
    for (run, step), attempts in training.plans.items():
        for plan in attempts.values():
            if run == training.run and plan.manifest_digest not in known:
                message = f"no manifest {plan.manifest_digest} is on the topic"
                yield Problem(Kind.LOST, "manifest-missing", f"{run}/{step}/{plan.attempt}", message)


def plans_are_unaltered(index: Index, training: Training) -> Iterator[Problem]:
    """A plan is what its id says, and there is one per attempt."""
    for seen in index.log.plans:
        plan = seen.record
        if plan.run_id != training.run:
            continue
        if record_digest(plan, {"plan_id", "event_time", "owner"}) != plan.plan_id:
            yield Problem(Kind.WRONG, "plan-altered", plan.key, f"{seen}: its content is not what its plan_id says")
        if training.plans[plan.run_id, plan.step][plan.attempt].plan_id != plan.plan_id:
            yield Problem(Kind.DUPLICATE, "plan-rewritten", plan.key, f"{seen}: another plan of the same attempt")


def branches_begin_where_they_say(index: Index, training: Training) -> Iterator[Problem]:
    """A run that goes on from another begins with the adapter that the other's step gave."""
    first = next(iter(training.manifests.get(training.run, ())), None)
    if first is None or first.parent_run is None or first.parent_step is None:
        return
    where, parent = f"{training.run}/0", f"{first.parent_run}/{first.parent_step}"
    found = training.steps.get((first.parent_run, first.parent_step))
    if found is None:
        yield Problem(Kind.LOST, "parent-missing", where, f"it goes on from {parent}, which has no StepResult")
    elif found[-1].adapter_sha256 != first.initial_adapter_sha256:
        message = f"it begins with {first.initial_adapter_sha256}, but {parent} gave {found[-1].adapter_sha256}"
        yield Problem(Kind.WRONG, "parent-sha", where, message)


def steps_are_answered_for(index: Index, training: Training) -> Iterator[Problem]:
    """Steps follow each other without a gap; each has its plan and one result. Only the last may still be under way."""
    results = {step: found for (run, step), found in training.steps.items() if run == training.run}
    planned = {step for run, step in training.plans if run == training.run}
    last = max(results, default=-1)
    for step in range(last + 1):
        where = f"{training.run}/{step}"
        found = results.get(step)
        if found is None:
            yield Problem(Kind.LOST, "step-without-result", where, "no StepResult, though later steps have one")
        elif len({(r.adapter_sha256, r.attempt, r.plan_id, r.policy_version) for r in found}) > 1:
            yield Problem(Kind.DUPLICATE, "two-results", where, "StepResults that differ")
        elif step > 0:
            plan = training.winners.get(training.run, {}).get(step)
            if plan is None or plan.plan_id != found[0].plan_id:
                message = f"no plan {found[0].plan_id} of attempt {found[0].attempt} is on the topic"
                yield Problem(Kind.LOST, "result-without-plan", where, message)
    for step in sorted(planned):
        if step > last + 1:
            yield Problem(
                Kind.LOST, "step-without-result", f"{training.run}/{step}", "planned before the step before it"
            )
    first = training.manifests.get(training.run, [])
    if first and 0 in results and results[0][0].adapter_sha256 != first[0].initial_adapter_sha256:
        message = "the initial adapter is not the one that the manifest names"
        yield Problem(Kind.WRONG, "policy-sha", f"{training.run}/0", message)


def versions_are_published(index: Index, training: Training) -> Iterator[Problem]:
    """Each step's adapter is published once, under the next version, with the sha256 of its StepResult."""
    published: dict[int, list[PolicyUpdate]] = defaultdict(list)
    names: dict[str, tuple[str, str, int]] = {}
    highest: dict[str, int] = {}
    for seen in index.log.updates:
        update = seen.record
        identity = (update.sha256, update.run_id, update.step)
        if update.name in names:
            if names[update.name] != identity:
                yield Problem(
                    Kind.DUPLICATE, "version-reused", update.name, f"{seen}: the name was given to another adapter"
                )
            continue
        names[update.name] = identity
        if update.version <= highest.get(update.policy, -1):
            message = f"{seen}: version {update.version} after {highest[update.policy]}"
            yield Problem(Kind.WRONG, "version-order", update.name, message)
        highest[update.policy] = max(update.version, highest.get(update.policy, -1))
        if update.run_id == training.run:
            published[update.step].append(update)
    results = {step: found[0] for (run, step), found in training.steps.items() if run == training.run}
    starts = {manifest.first_version for manifest in training.manifests.get(training.run, ())}
    for step, result in results.items():
        where = f"{training.run}/{step}"
        if starts and result.policy_version - step not in starts:
            yield Problem(Kind.WRONG, "version-order", where, f"version {result.policy_version} at step {step}")
        updates = published.get(step, [])
        if not updates:
            yield Problem(Kind.LOST, "unpublished-step", where, "no PolicyUpdate")
        for update in updates:
            if (update.sha256, update.version) != (result.adapter_sha256, result.policy_version):
                message = (
                    f"{update.name} {update.sha256}, but the step gave v{result.policy_version} {result.adapter_sha256}"
                )
                yield Problem(Kind.WRONG, "policy-sha", where, message)
    for step in sorted(set(published) - set(results)):
        message = f"{published[step][0].name} was published without a StepResult"
        yield Problem(Kind.LOST, "step-without-result", f"{training.run}/{step}", message)


def samplers_exist(index: Index, training: Training) -> Iterator[Problem]:
    """Every adapter that a result names was published."""
    known = {seen.record.name for seen in index.log.updates}
    policies = {seen.record.policy for seen in index.log.updates}
    for result_id, copies in index.results.items():
        for span in copies[0].record.policy_spans:
            try:
                policy, _ = parse_policy_name(span.policy)
            except ValueError:
                continue  # the base model, or a server's own name for one
            if policy in policies and span.policy not in known:
                yield Problem(
                    Kind.WRONG, "unknown-sampler", result_id, f"{copies[0]}: {span.policy} was never published"
                )


RULES = (
    nothing_is_trained_twice,
    rollouts_are_used,
    drops_say_how_many,
    plans_name_what_is_there,
    manifests_hold,
    plans_are_unaltered,
    branches_begin_where_they_say,
    steps_are_answered_for,
    versions_are_published,
    samplers_exist,
)
