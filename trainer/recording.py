"""What of a recorded run is replayed: its results and plans, and where training begins. Every rollout is looked up
and checked."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from schemas.codec import Codec
from schemas.digest import digest_holds
from schemas.records import BatchPlan, Record, Rollout, RunManifest, StepResult
from tentalis.config import Settings
from trainer.checkpoint import BadCheckpoint, Checkpoint, checkpoints
from trainer.fetch import BadRollouts, examine
from trainer.manifest import digest_of
from trainer.plan import identified
from trainer.runlog import RunLog, read_run

log = logging.getLogger(__name__)


class CannotReplay(RuntimeError):
    """The log does not hold what a replay needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The part of a run that is replayed: results of its steps, the winning plans of all but the first of them.

    `beginning` is the checkpoint that the first plan goes on from; None: the initial adapter, or what the plans that
    are `inherited` make of it. `left_out` by step; from `same_until` on another thing is trained, for want of rollouts.
    """

    run: RunLog
    results: tuple[StepResult, ...]
    plans: tuple[BatchPlan, ...]
    beginning: Checkpoint | None
    inherited: tuple["Inherited", ...]
    left_out: Mapping[int, tuple[str, ...]]
    same_until: int

    @property
    def first(self) -> RunManifest | None:
        """That of where it all began: of the oldest run that this one goes on from, or of itself."""
        return (self.inherited[0].run if self.inherited else self.run).first

    def segments(self) -> Iterator[tuple[RunManifest, int, tuple[BatchPlan, ...]]]:
        """Consecutive plans of one manifest, with the step before them, the inherited ones first.

        The initial adapter is that of the oldest run's first manifest. Where the first plan is of another one
        (something was changed before any step was trained), or where there is no plan, that comes before them, without
        a plan.
        """
        logs = [(each.run, each.plans) for each in self.inherited] + [(self.run, list(self.plans))]
        first, plan = self.first, next((plans[0] for _, plans in logs if plans), None)
        changed = plan is not None and first is not None and plan.manifest_digest != first.digest
        if first is not None and (plan is None or (changed and self.beginning is None)):
            yield first, self.results[0].step, ()
        for run, plans in logs:
            for digest, found in groupby(plans, key=lambda plan: plan.manifest_digest):
                group = tuple(found)
                yield run.manifests[digest], group[0].step - 1, group


def checked_recording(
    run_id: str,
    settings: Settings,
    codec: Codec,
    from_step: int,
    to_step: int | None,
    allow_missing: bool,
    unreadable: list[str] | None,
    *,
    train: bool = True,
) -> Recording:
    """What is to be replayed, every rollout of it looked up and checked. Not `train`: to be looked at only, from
    `from_step` on, wherever a training would begin. Raises CannotReplay, BadRollouts."""
    run = read_run(settings, codec, run_id)
    passed_over = [] if unreadable is None else unreadable
    passed_over += run.unreadable
    results, plans = recorded(run, to_step)
    if results[-1].step < from_step:
        raise CannotReplay(
            f"run {run_id} has steps {results[0].step} to {results[-1].step}; there is nothing from step {from_step} on"
        )
    beginning = beginning_of(settings, run, results, from_step) if train else None
    begin = from_step - 1 if not train else _first_step(run, results, beginning)
    results = [result for result in results if result.step >= begin]
    plans = [plan for plan in plans if plan.step > begin]
    inherited = ancestors(settings, codec, run) if beginning is None and begin <= results[0].step else []
    for each in (*inherited, Inherited(run, plans)):
        _check_unaltered(each.run, each.plans)
    before = [plan for each in inherited for plan in each.plans]
    places: dict[str, tuple[int, int]] = {}
    problems = examine(settings, codec, [row for plan in (*before, *plans) for row in plan.rows], passed_over, places)
    if any(problem.kind == "forged" or not allow_missing for problem in problems):
        raise BadRollouts(problems)
    gone = {problem.rollout_id: str(problem) for problem in problems}
    left_out = {p.step: tuple(gone[r.rollout_id] for r in p.rows if r.rollout_id in gone) for p in plans}
    gap = min((step for step, reasons in left_out.items() if reasons), default=results[-1].step + 1)
    if any(row.rollout_id in gone for plan in before for row in plan.rows):
        gap = results[0].step
    return Recording(
        run,
        tuple(results),
        tuple(_found(plan, places) for plan in plans),
        beginning,
        tuple(replace(each, plans=[_found(plan, places) for plan in each.plans]) for each in inherited),
        left_out,
        gap,
    )


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a run has from an earlier one: that one's manifests, and its plans up to where the ways parted."""

    run: RunLog
    plans: list[BatchPlan]


def ancestors(settings: Settings, codec: Codec, run: RunLog) -> list[Inherited]:
    """What a run that came of a rollback was trained on before it began, the oldest first. Raises CannotReplay if its
    first adapter is not the one that its parent recorded."""
    found: list[Inherited] = []
    seen = {run.run_id}
    while run.first is not None and run.first.parent_run is not None and run.first.parent_step is not None:
        wanted, step = run.first.initial_adapter_sha256, run.first.parent_step
        run = read_run(settings, codec, run.first.parent_run)
        if run.run_id in seen:
            raise CannotReplay(f"run {run.run_id} is its own parent")
        seen.add(run.run_id)
        results, plans = recorded(run, step)
        if results[-1].adapter_sha256 != wanted:
            raise CannotReplay(
                f"the run begins with the adapter {wanted}, but step {step} of its parent {run.run_id} recorded "
                f"{results[-1].adapter_sha256}"
            )
        found.insert(0, Inherited(run, plans))
    return found


def recorded(run: RunLog, to_step: int | None) -> tuple[list[StepResult], list[BatchPlan]]:
    """The results of the run's steps up to `to_step`, and the winning plans of all but the first. Raises
    CannotReplay."""
    if not run.manifests:
        known = ", ".join(sorted(run.other_runs)) or "none"
        raise CannotReplay(f"the log knows no run {run.run_id!r}; runs there: {known}")
    last = run.last_step if to_step is None else to_step
    if last > run.last_step:
        raise CannotReplay(f"run {run.run_id} has results up to step {run.last_step}, not {last}")
    first = min((step for step, _ in run.results), default=0)
    if first and (run.first is None or run.first.parent_step != first):
        raise CannotReplay(f"the result of step 0 of run {run.run_id} is not on the log")
    results: list[StepResult] = []
    plans: list[BatchPlan] = []
    for step in range(first, last + 1):
        result = run.winner(step)
        if result is None:
            raise CannotReplay(f"the result of step {step} of run {run.run_id} is not on the log")
        results.append(result)
        if step == first:
            continue
        plan = run.plans.get((step, result.attempt))
        if plan is None or plan.plan_id != result.plan_id:
            raise CannotReplay(
                f"the plan of step {step}, attempt {result.attempt}, of run {run.run_id} is not on the log"
            )
        if plan.manifest_digest not in run.manifests:
            raise CannotReplay(
                f"the manifest {plan.manifest_digest} of step {step} of run {run.run_id} is not on the log"
            )
        plans.append(plan)
    if not results:
        raise CannotReplay(f"run {run.run_id} has no step up to {last}")
    return results, plans


def _check_unaltered(run: RunLog, plans: Sequence[BatchPlan]) -> None:
    """Raises CannotReplay for a manifest or a plan whose content is not what its id says."""
    first = [] if run.first is None else [run.first]
    named = (run.manifests[digest] for digest in dict.fromkeys(plan.manifest_digest for plan in plans))
    for record in (*first, *named, *plans):
        if (problem := altered(record)) is not None:
            raise CannotReplay(f"forged: {problem}")


def altered(record: Record) -> str | None:
    """Why the content of a record is not what its id or digest says, None if it is."""
    match record:
        case RunManifest() if digest_of(record) != record.digest:
            return f"the manifest {record.key} has content that its digest does not cover"
        case BatchPlan() if identified(record).plan_id != record.plan_id:
            return (
                f"the plan of step {record.step}, attempt {record.attempt}, of run {record.run_id} has content that "
                f"its id {record.plan_id} does not cover"
            )
        case Rollout() if not digest_holds(record):
            return f"the rollout {record.key} has content that its digest does not cover"
    return None


def beginning_of(settings: Settings, run: RunLog, results: Sequence[StepResult], from_step: int) -> Checkpoint | None:
    """The checkpoint to train from; None: from the initial adapter, of this run or of the one that it came of."""
    by_step = {result.step: result for result in results}
    first, wanted = results[0].step, max(from_step - 1, results[0].step)
    found = None
    if wanted > first:
        found = _recorded_checkpoint(settings, run.run_id, by_step, wanted)
        if found is None or found.state.step < wanted:
            reached = f"begins at step {first}" if found is None else f"goes on from that of step {found.state.step}"
            log.warning(
                "no checkpoint after step %d of run %s is on this machine: training %s", wanted, run.run_id, reached
            )
    if found is not None:
        log.info("training begins at the checkpoint after step %d: %s", found.state.step, found.folder)
        return found
    manifest = run.first
    if manifest is None or manifest.parent_run is None or manifest.parent_step is None:
        return None
    own = _recorded_checkpoint(settings, run.run_id, by_step, first)
    step = manifest.parent_step
    return own or _recorded_checkpoint(settings, manifest.parent_run, {step: results[0]}, step, plan=False)


def _first_step(run: RunLog, results: Sequence[StepResult], beginning: Checkpoint | None) -> int:
    """The step that training goes on from. A checkpoint of the parent counts that run's steps, not this one's."""
    if beginning is None or beginning.state.run_id != run.run_id:
        return results[0].step
    return beginning.state.step


def _recorded_checkpoint(
    settings: Settings, run_id: str, results: Mapping[int, StepResult], wanted: int, *, plan: bool = True
) -> Checkpoint | None:
    """The newest checkpoint of a run up to a step that is what the log recorded: of the run itself, or of an earlier
    replay of it."""
    replays = settings.home / "replays"
    # A branch's replay leaves what it trained of its ancestors in folders below its own.
    roots = [settings.home / "checkpoints" / run_id, *replays.glob(f"{run_id}-*"), *replays.glob(f"*/{run_id}")]
    found: list[Checkpoint] = []
    for root in roots:
        try:
            found += checkpoints(root)
        except BadCheckpoint as error:
            log.warning("passed over: %s", error)
    for each in sorted(found, key=lambda c: -c.state.step):
        state, result = each.state, results.get(each.state.step)
        if state.step > wanted or state.run_id != run_id or result is None:
            continue
        if state.adapter_sha256 != result.adapter_sha256 or (plan and state.plan_id != result.plan_id):
            continue
        try:
            each.verify()
        except BadCheckpoint as error:
            log.warning("passed over: %s", error)
            continue
        return each
    return None


def _found(plan: BatchPlan, places: Mapping[str, tuple[int, int]]) -> BatchPlan:
    """The plan with its rollouts where they are now, and without those that are not there."""
    rows = tuple(
        row.model_copy(update=dict(zip(("partition", "offset"), places[row.rollout_id], strict=True)))
        for row in plan.rows
        if row.rollout_id in places
    )
    return plan.model_copy(update={"rows": rows})
