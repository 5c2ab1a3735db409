"""Rules about training: no rollout is trained twice in a lineage or skipped silently; each step has plan and result."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from schemas.digest import record_digest
from schemas.ids import graded_sample, parse_policy_name
from schemas.records import BatchPlan, PolicyUpdate, Rollout, RunManifest, StepResult
from tentalis.ops.verify.index import Index
from tentalis.ops.verify.losses import AcceptedLosses
from tentalis.ops.verify.model import Log, ProblemKind, VerifyProblem
from tentalis.policies.lineage import Lineage


@dataclass(frozen=True)
class TrainedRuns:
    """The runs on the runs and batches topics; `winners` maps run -> step -> the plan that was trained.

    `losses` tell which offsets of plans and manifests are of a rollouts topic that was lost.
    """

    run: str
    manifests: dict[str, list[RunManifest]]
    plans: dict[tuple[str, int], dict[int, BatchPlan]]
    steps: dict[tuple[str, int], list[StepResult]]
    winners: dict[str, dict[int, BatchPlan]]
    losses: AcceptedLosses = field(default_factory=AcceptedLosses)

    @classmethod
    def of(cls, log: Log) -> "TrainedRuns":
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
        losses = AcceptedLosses.of(log.losses)
        return cls(log.run, dict(manifests), dict(plans), dict(steps), dict(winners), losses)

    @cached_property
    def lineage(self) -> Lineage:
        """The lineage of the runs: which run continues which."""
        return Lineage(manifest for found in self.manifests.values() for manifest in found)

    @cached_property
    def fates(self) -> "Fates":
        """Returns the index that tells for each rollout if it was trained, dropped, or not reached yet."""
        return Fates(self)

    def leaves(self) -> list[str]:
        """Returns the latest runs that continue this one, or the run itself if none does."""
        lineage = self.lineage
        descendants = [run for run in lineage.runs if self.run in lineage.path(run)]
        parents = {parent.run for run in lineage.runs if (parent := lineage.parent(run)) is not None}
        return [run for run in descendants if run not in parents] or [self.run]

    def considered(self, run: str) -> dict[int, tuple[int, int]]:
        """Returns, by partition, the first offset that a run read, and the first that none of its steps considered."""
        manifests, steps = self.manifests.get(run, []), self.winners.get(run, {})
        start = {at.partition: at.offset for at in manifests[0].start} if manifests else {}
        low_water = {at.partition: at.offset for at in steps[max(steps)].low_water} if steps else start
        found = {p: (start.get(p, 0), low_water.get(p, 0)) for p in start.keys() | low_water.keys()}
        if manifests and self.losses.rollouts:
            begun = manifests[0].event_time
            read = steps[max(steps)].event_time if steps else begun
            for partition, (first, end) in found.items():
                if self.losses.first_lost(partition, begun) is not None:
                    first = 0  # the trainer began anew in this partition
                found[partition] = first, self.still_there(partition, end, read)
        return found

    def still_there(self, partition: int, end: int, at: int) -> int:
        """Returns how much of a range of offsets up to `end`, noted at a time (ms), is of the rollouts topic that is
        there now: the end of that part."""
        lost = self.losses.first_lost(partition, at)
        return end if lost is None else min(end, lost)

    def dropped(self, plan: BatchPlan) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the partition and the half-open range of each drop of a plan, without the offsets that were lost."""
        for drop in plan.drops:
            end = self.still_there(drop.partition, drop.last_offset + 1, plan.event_time)
            if drop.first_offset < end:
                yield drop.partition, (drop.first_offset, end)

    def open_steps(self) -> list[int]:
        """Returns the steps of the run that have a plan but no result."""
        return sorted(step for run, step in self.plans if run == self.run and (run, step) not in self.steps)


def nothing_is_trained_twice(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """A rollout, and the reward of a sample, is in at most one trained plan, over a run and all runs that it
    continues."""
    reported, lineage = set(), training.lineage
    for leaf in training.leaves():
        trained: dict[str, list[str]] = defaultdict(list)
        rewarded: dict[str, dict[str, None]] = defaultdict(dict)
        for run in lineage.path(leaf):
            for step, plan in sorted(training.winners.get(run, {}).items()):
                for row in plan.rows:
                    trained[row.rollout_id].append(f"{run}/{step}")
                    if row.rl:
                        rewarded[graded_sample(row.rollout_id) or row.rollout_id][row.rollout_id] = None
        for rollout_id, steps in trained.items():
            if len(steps) > 1 and (rollout_id, *steps) not in reported:
                reported.add((rollout_id, *steps))
                yield VerifyProblem(
                    ProblemKind.DUPLICATE, "trained-twice", rollout_id, f"trained in the steps {', '.join(steps)}"
                )
        for sample, rollouts in rewarded.items():
            if len(rollouts) > 1 and (sample, *rollouts) not in reported:
                reported.add((sample, *rollouts))
                where = ", ".join(f"{rollout} in {trained[rollout][0]}" for rollout in rollouts)
                yield VerifyProblem(
                    ProblemKind.DUPLICATE, "trained-twice", sample, f"its reward was trained more than once: {where}"
                )


class Fates:
    """Tells for each rollout if it was trained, dropped, or not reached yet, by the plans of a run and of all runs
    connected to it as parent, child or branch."""

    def __init__(self, training: TrainedRuns) -> None:
        family = training.lineage.family(training.run)
        plans = [plan for run in family for plan in training.winners.get(run, {}).values()]
        dropped: dict[int, list[tuple[int, int]]] = defaultdict(list)
        passed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for partition, offsets in (drop for plan in plans for drop in training.dropped(plan)):
            dropped[partition].append(offsets)
        for partition, offsets in (item for run in family for item in training.considered(run).items()):
            passed[partition].append(offsets)
        self._trained = {row.rollout_id for plan in plans for row in plan.rows}
        self._dropped = {partition: _merged(ranges) for partition, ranges in dropped.items()}
        self._passed = {partition: _merged(ranges) for partition, ranges in passed.items()}

    def of(self, rollout: Rollout, partition: int, offset: int) -> str | None:
        """Returns trained, dropped, ahead (not reached yet), or None (skipped silently).

        A rollout that an abandoned branch trained is skipped by the other branches; it counts as trained.
        """
        if rollout.rollout_id in self._trained:
            return "trained"
        if _covered(self._dropped.get(partition, ()), offset):
            return "dropped"
        return None if _covered(self._passed.get(partition, ()), offset) else "ahead"


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns half-open ranges in order, with overlapping ranges merged."""
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


def rollouts_are_used(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Every rollout of the trained policy was trained, or dropped with a reason, or is ahead of the low-water mark."""
    policies = {manifest.policy for manifest in training.manifests.get(training.run, ())}
    for key, copies in index.rollouts.items():
        first = copies[0]
        if first.record.head.policy not in policies or index.dead(copies):
            continue
        if training.fates.of(first.record, first.partition, first.offset) is None:
            message = f"{first} is below the low-water mark, but in no plan and in no drop"
            yield VerifyProblem(ProblemKind.LOST, "untrained-rollout", key, message)


def drops_say_how_many(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """The drops of a plan count at least as many records as their ranges have untrained ones.

    So a range that was merged from neighbouring drops does not hide a lost record.
    """
    policies = {manifest.policy for manifest in training.manifests.get(training.run, ())}
    plans = training.winners.get(training.run, {})
    rows = {
        (row.partition, row.offset)
        for plan in plans.values()
        for row in plan.rows
        if not training.losses.rollout_lost(row.partition, row.offset, plan.event_time)
    }
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
            ranges = _merged(offsets for at, offsets in training.dropped(plan) if at == partition)
            lying = untrained[partition]
            covered = sum(bisect_left(lying, end) - bisect_left(lying, start) for start, end in ranges)
            stated = sum(drop.count for drop in drops)
            if covered > stated:
                message = f"its drops on partition {partition} count {stated} records, but their ranges have {covered}"
                yield VerifyProblem(ProblemKind.LOST, "drop-count", f"{training.run}/{step}", message)


def plans_name_what_is_there(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Every row of a trained plan is a rollout on the topic, with the same digest and with the parts that train."""
    ids = set(index.tasks)
    for step, plan in sorted(training.winners.get(training.run, {}).items()):
        for row in plan.rows:
            where = f"{training.run}/{step} {row.rollout_id}"
            copies = index.rollouts.get(row.rollout_id)
            if row.rollout_id in index.lost_rollouts:
                continue
            if copies is None:
                if any(row.rollout_id.startswith(f"{task_id}/") for task_id in ids):
                    yield VerifyProblem(
                        ProblemKind.LOST, "missing-rollout", where, "planned, but not on the rollouts topic"
                    )
                continue
            rollout = copies[0].record
            if row.digest != rollout.digest:
                yield VerifyProblem(
                    ProblemKind.WRONG, "forged-rollout", where, f"planned as {row.digest}, recorded {rollout.digest}"
                )
            elif not rollout.forgotten and ((row.rl and not rollout.has_rl) or (row.opd and not rollout.has_opd)):
                yield VerifyProblem(
                    ProblemKind.WRONG, "plan-row", where, "it trains a part that the rollout does not have"
                )
            elif not rollout.forgotten and row.n_tokens != rollout.n_tokens:
                yield VerifyProblem(
                    ProblemKind.WRONG, "plan-row", where, f"planned {row.n_tokens} tokens, has {rollout.n_tokens}"
                )
            # Compaction keeps only the last copy, so the planned place may be gone: the key identifies the rollout.
            there = any((copy.partition, copy.offset) == (row.partition, row.offset) for copy in copies)
            # A rollout that was imported after its topic was lost has another place.
            moved = training.losses.rollout_lost(row.partition, row.offset, plan.event_time)
            if not there and not moved and all(copy.offset < row.offset for copy in copies):
                message = f"planned at {row.partition}@{row.offset}, but it was never at that offset"
                yield VerifyProblem(ProblemKind.WRONG, "plan-row", where, message)
        if any(row.rank >= plan.world_size for row in plan.rows):
            yield VerifyProblem(
                ProblemKind.WRONG, "plan-row", f"{training.run}/{step}", f"a rank not below {plan.world_size}"
            )


def manifests_hold(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Every plan was made under a manifest that is on the topic and unaltered."""
    manifests = training.manifests.get(training.run, [])
    for manifest in manifests:
        if record_digest(manifest, {"digest", "event_time"}) != manifest.digest:
            yield VerifyProblem(
                ProblemKind.WRONG, "manifest-altered", manifest.key, "its content does not match its digest"
            )
    known = {manifest.digest for manifest in manifests}
    for (run, step), attempts in training.plans.items():
        for plan in attempts.values():
            if run == training.run and plan.manifest_digest not in known:
                message = f"its manifest {plan.manifest_digest} is not on the topic"
                yield VerifyProblem(ProblemKind.LOST, "manifest-missing", f"{run}/{step}/{plan.attempt}", message)


def plans_are_unaltered(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """The content of a plan matches its id, and each attempt has one plan."""
    for seen in index.log.plans:
        plan = seen.record
        if plan.run_id != training.run:
            continue
        if record_digest(plan, {"plan_id", "event_time", "owner"}) != plan.plan_id:
            yield VerifyProblem(
                ProblemKind.WRONG, "plan-altered", plan.key, f"{seen}: its content does not match its plan_id"
            )
        if training.plans[plan.run_id, plan.step][plan.attempt].plan_id != plan.plan_id:
            yield VerifyProblem(
                ProblemKind.DUPLICATE, "plan-rewritten", plan.key, f"{seen}: the same attempt has another plan"
            )


def branches_begin_where_they_say(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """A continuation run begins with the adapter of the step that it continues."""
    first = next(iter(training.manifests.get(training.run, ())), None)
    if first is None or first.parent_run is None or first.parent_step is None:
        return
    where, parent = f"{training.run}/0", f"{first.parent_run}/{first.parent_step}"
    found = training.steps.get((first.parent_run, first.parent_step))
    if found is None:
        yield VerifyProblem(
            ProblemKind.LOST, "parent-missing", where, f"it continues {parent}, which has no StepResult"
        )
    elif found[-1].adapter_sha256 != first.initial_adapter_sha256:
        message = f"it begins with adapter {first.initial_adapter_sha256}, but {parent} made {found[-1].adapter_sha256}"
        yield VerifyProblem(ProblemKind.WRONG, "parent-sha", where, message)


def steps_are_answered_for(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Steps have no gap, and each has its plan and one result. Only the last may still be under way."""
    results = {step: found for (run, step), found in training.steps.items() if run == training.run}
    planned = {step for run, step in training.plans if run == training.run}
    last = max(results, default=-1)
    for step in range(last + 1):
        where = f"{training.run}/{step}"
        found = results.get(step)
        if found is None:
            yield VerifyProblem(
                ProblemKind.LOST, "step-without-result", where, "no StepResult, though later steps have one"
            )
        elif len({(r.adapter_sha256, r.attempt, r.plan_id, r.policy_version) for r in found}) > 1:
            yield VerifyProblem(ProblemKind.DUPLICATE, "two-results", where, "its StepResults differ")
        elif step > 0:
            plan = training.winners.get(training.run, {}).get(step)
            if plan is None or plan.plan_id != found[0].plan_id:
                message = f"plan {found[0].plan_id} of attempt {found[0].attempt} is not on the topic"
                yield VerifyProblem(ProblemKind.LOST, "result-without-plan", where, message)
    for step in sorted(planned):
        if step > last + 1:
            yield VerifyProblem(
                ProblemKind.LOST,
                "step-without-result",
                f"{training.run}/{step}",
                "planned before an earlier step's result",
            )
    first = training.manifests.get(training.run, [])
    if first and 0 in results and results[0][0].adapter_sha256 != first[0].initial_adapter_sha256:
        message = "the initial adapter differs from that of the manifest"
        yield VerifyProblem(ProblemKind.WRONG, "policy-sha", f"{training.run}/0", message)


def versions_are_published(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Each step's adapter is published once, under the next version, with the sha256 of its StepResult."""
    published: dict[int, list[PolicyUpdate]] = defaultdict(list)
    names: dict[str, tuple[str, str, int]] = {}
    highest: dict[str, int] = {}
    for seen in index.log.updates:
        update = seen.record
        identity = (update.sha256, update.run_id, update.step)
        if update.name in names:
            if names[update.name] != identity:
                yield VerifyProblem(
                    ProblemKind.DUPLICATE,
                    "version-reused",
                    update.name,
                    f"{seen}: another adapter already has this name",
                )
            continue
        names[update.name] = identity
        if update.version <= highest.get(update.policy, -1):
            message = f"{seen}: version {update.version} follows version {highest[update.policy]}"
            yield VerifyProblem(ProblemKind.WRONG, "version-order", update.name, message)
        highest[update.policy] = max(update.version, highest.get(update.policy, -1))
        if update.run_id == training.run:
            published[update.step].append(update)
    results = {step: found[0] for (run, step), found in training.steps.items() if run == training.run}
    starts = {manifest.first_version for manifest in training.manifests.get(training.run, ())}
    for step, result in results.items():
        where = f"{training.run}/{step}"
        if starts and result.policy_version - step not in starts:
            yield VerifyProblem(
                ProblemKind.WRONG, "version-order", where, f"wrong version {result.policy_version} of step {step}"
            )
        updates = published.get(step, [])
        if not updates:
            # Published after its result: a live trainer may be doing it with its last step.
            kind = ProblemKind.OPEN if step == max(results) else ProblemKind.LOST
            yield VerifyProblem(kind, "unpublished-step", where, "no PolicyUpdate")
        for update in updates:
            if (update.sha256, update.version) != (result.adapter_sha256, result.policy_version):
                message = (
                    f"{update.name} {update.sha256}, but the step made v{result.policy_version} {result.adapter_sha256}"
                )
                yield VerifyProblem(ProblemKind.WRONG, "policy-sha", where, message)
    for step in sorted(set(published) - set(results)):
        message = f"{published[step][0].name} was published without a StepResult"
        yield VerifyProblem(ProblemKind.LOST, "step-without-result", f"{training.run}/{step}", message)


def samplers_exist(index: Index, training: TrainedRuns) -> Iterator[VerifyProblem]:
    """Every adapter that a result names was published."""
    known = {seen.record.name for seen in index.log.updates}
    policies = {seen.record.policy for seen in index.log.updates}
    for result_id, copies in index.results.items():
        for span in copies[0].record.policy_spans:
            try:
                policy, _ = parse_policy_name(span.policy)
            except ValueError:
                continue  # the base model, or a server's own name for a model
            if policy in policies and span.policy not in known:
                yield VerifyProblem(
                    ProblemKind.WRONG, "unknown-sampler", result_id, f"{copies[0]}: {span.policy} was never published"
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
