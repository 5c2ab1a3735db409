"""The recorded part of a run that is replayed: its results and plans, and the start of training. Checks every
rollout."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from schemas.digest import digest_holds
from schemas.records import BatchPlan, Record, Rollout, RunManifest, StepResult
from schemas.wire.codec import Codec
from tentalis.service.settings import Settings
from trainer.data.fetch import BadRollouts, find_problems, rows_at
from trainer.data.plan import with_plan_id
from trainer.run.checkpoint import BadCheckpoint, Checkpoint, CheckpointState, checkpoint_root, read_checkpoints
from trainer.run.manifest import manifest_digest
from trainer.run.run_log import RunLog, read_run
from trainer.run.stored_checkpoints import fetch_checkpoint

log = logging.getLogger(__name__)


class CannotReplay(RuntimeError):
    """The log lacks something that a replay needs; the message names it."""


@dataclass(frozen=True, slots=True)
class RunRecording:
    """The part of a run that is replayed: results of its steps, and the winning plans of all except the first of them.

    `beginning`: the checkpoint before the first plan. None: the initial adapter, after the `inherited` plans if there
    are any. `left_out`: missing rollouts by step. From step `comparable_until` on the replay differs from the run,
    because rollouts are missing.
    """

    run: RunLog
    results: tuple[StepResult, ...]
    plans: tuple[BatchPlan, ...]
    beginning: Checkpoint | None
    inherited: tuple["InheritedRun", ...]
    left_out: Mapping[int, tuple[str, ...]]
    comparable_until: int

    @property
    def first_manifest(self) -> RunManifest | None:
        """The first manifest of the whole lineage: of the oldest ancestor, or of the run itself."""
        return (self.inherited[0].run if self.inherited else self.run).first_manifest

    def segments(self) -> Iterator[tuple[RunManifest, int, tuple[BatchPlan, ...]]]:
        """Yields consecutive plans of one manifest, with the step before them, the inherited ones first.

        The initial adapter is that of the oldest run's first manifest. If the first plan belongs to another manifest
        (something was changed before any step was trained), or if there is no plan, the first manifest is yielded
        before them without a plan.
        """
        runs = [(ancestor.run, ancestor.plans) for ancestor in self.inherited] + [(self.run, list(self.plans))]
        first, plan = self.first_manifest, next((plans[0] for _, plans in runs if plans), None)
        changed = plan is not None and first is not None and plan.manifest_digest != first.digest
        if first is not None and (plan is None or (changed and self.beginning is None)):
            yield first, self.results[0].step, ()
        for run, plans in runs:
            for digest, consecutive in groupby(plans, key=lambda plan: plan.manifest_digest):
                group = tuple(consecutive)
                yield run.manifests[digest], group[0].step - 1, group


def read_recording(
    run_id: str,
    settings: Settings,
    codec: Codec,
    from_step: int,
    to_step: int | None,
    allow_missing: bool,
    unreadable: list[str] | None,
    *,
    train: bool = True,
) -> RunRecording:
    """Returns the part of the run to replay, with every rollout looked up and checked. With `train` False nothing will
    be trained: it starts at `from_step`, wherever training would begin. Raises CannotReplay, BadRollouts."""
    run = read_run(settings, codec, run_id)
    skipped = [] if unreadable is None else unreadable
    skipped += run.unreadable
    results, plans = recorded_steps(run, to_step)
    if results[-1].step < from_step:
        raise CannotReplay(
            f"run {run_id} has steps {results[0].step} to {results[-1].step}, none from step {from_step} on"
        )
    beginning = find_beginning(settings, run, results, from_step) if train else None
    first_step = from_step - 1 if not train else _first_step(run, results, beginning)
    results = [result for result in results if result.step >= first_step]
    plans = [plan for plan in plans if plan.step > first_step]
    inherited = read_ancestors(settings, codec, run) if beginning is None and first_step <= results[0].step else []
    for part in (*inherited, InheritedRun(run, plans)):
        _check_unaltered(part.run, part.plans)
    inherited_plans = [plan for part in inherited for plan in part.plans]
    places: dict[str, tuple[int, int]] = {}
    problems = find_problems(
        settings, codec, [row for plan in (*inherited_plans, *plans) for row in plan.rows], skipped, places
    )
    if any(problem.kind == "forged" or not allow_missing for problem in problems):
        raise BadRollouts(problems)
    missing = {problem.rollout_id: str(problem) for problem in problems}
    left_out = {
        plan.step: tuple(missing[row.rollout_id] for row in plan.rows if row.rollout_id in missing) for plan in plans
    }
    first_gap = min((step for step, reasons in left_out.items() if reasons), default=results[-1].step + 1)
    if any(row.rollout_id in missing for plan in inherited_plans for row in plan.rows):
        first_gap = results[0].step
    return RunRecording(
        run,
        tuple(results),
        tuple(_at_present_offsets(plan, places) for plan in plans),
        beginning,
        tuple(replace(part, plans=[_at_present_offsets(plan, places) for plan in part.plans]) for part in inherited),
        left_out,
        first_gap,
    )


@dataclass(frozen=True, slots=True)
class InheritedRun:
    """An earlier run from which a run descends: its manifests, and its plans up to the branch point."""

    run: RunLog
    plans: list[BatchPlan]


def read_ancestors(settings: Settings, codec: Codec, run: RunLog) -> list[InheritedRun]:
    """Returns the runs from which a rolled-back run descends, the oldest first. Raises CannotReplay if a run's first
    adapter is not the one that its parent recorded."""
    ancestors: list[InheritedRun] = []
    seen = {run.run_id}
    while (
        run.first_manifest is not None
        and run.first_manifest.parent_run is not None
        and run.first_manifest.parent_step is not None
    ):
        expected_sha256, step = run.first_manifest.initial_adapter_sha256, run.first_manifest.parent_step
        run = read_run(settings, codec, run.first_manifest.parent_run)
        if run.run_id in seen:
            raise CannotReplay(f"run {run.run_id} is its own parent")
        seen.add(run.run_id)
        results, plans = recorded_steps(run, step)
        if results[-1].adapter_sha256 != expected_sha256:
            raise CannotReplay(
                f"the run begins with the adapter {expected_sha256}, but step {step} of its parent {run.run_id} "
                f"recorded {results[-1].adapter_sha256}"
            )
        ancestors.insert(0, InheritedRun(run, plans))
    return ancestors


def recorded_steps(run: RunLog, to_step: int | None) -> tuple[list[StepResult], list[BatchPlan]]:
    """Returns the results of the run's steps up to `to_step`, and the winning plans of all except the first. Raises
    CannotReplay."""
    if not run.manifests:
        known = ", ".join(sorted(run.other_runs)) or "none"
        raise CannotReplay(f"the log has no run {run.run_id!r}; runs there: {known}")
    last = run.last_step if to_step is None else to_step
    if last > run.last_step:
        raise CannotReplay(f"run {run.run_id} has results up to step {run.last_step}, not {last}")
    first = min((step for step, _ in run.results), default=0)
    if first and (run.first_manifest is None or run.first_manifest.parent_step != first):
        raise CannotReplay(f"the result of step 0 of run {run.run_id} is not on the log")
    results: list[StepResult] = []
    plans: list[BatchPlan] = []
    for step in range(first, last + 1):
        result = run.winning_result(step)
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
    """Raises CannotReplay for a manifest or a plan whose content does not match its id."""
    first_manifests = [] if run.first_manifest is None else [run.first_manifest]
    manifests = (run.manifests[digest] for digest in dict.fromkeys(plan.manifest_digest for plan in plans))
    for record in (*first_manifests, *manifests, *plans):
        if (problem := digest_mismatch(record)) is not None:
            raise CannotReplay(f"forged: {problem}")


def digest_mismatch(record: Record) -> str | None:
    """Returns the reason why a record's content does not match its id or digest, None if it does."""
    match record:
        case RunManifest() if manifest_digest(record) != record.digest:
            return f"the manifest {record.key} has content that does not match its digest"
        case BatchPlan() if with_plan_id(record).plan_id != record.plan_id:
            return (
                f"the plan of step {record.step}, attempt {record.attempt}, of run {record.run_id} has content that "
                f"does not match its id {record.plan_id}"
            )
        case Rollout() if not digest_holds(record):
            return f"the rollout {record.key} has content that does not match its digest"
    return None


def find_beginning(settings: Settings, run: RunLog, results: Sequence[StepResult], from_step: int) -> Checkpoint | None:
    """Returns the checkpoint from which to train; None: the initial adapter of this run or of its oldest ancestor."""
    by_step = {result.step: result for result in results}
    first, wanted = results[0].step, max(from_step - 1, results[0].step)
    checkpoint = None
    if wanted > first:
        checkpoint = _recorded_checkpoint(settings, run.run_id, by_step, wanted)
        if checkpoint is None or checkpoint.state.step < wanted:
            reached = (
                f"begins at step {first}" if checkpoint is None else f"begins at that of step {checkpoint.state.step}"
            )
            log.warning(
                "no checkpoint after step %d of run %s is on this machine: training %s", wanted, run.run_id, reached
            )
    if checkpoint is not None:
        log.info("training begins at the checkpoint after step %d: %s", checkpoint.state.step, checkpoint.folder)
        return checkpoint
    manifest = run.first_manifest
    if manifest is None or manifest.parent_run is None or manifest.parent_step is None:
        return None
    own_checkpoint = _recorded_checkpoint(settings, run.run_id, by_step, first)
    step = manifest.parent_step
    return own_checkpoint or _recorded_checkpoint(settings, manifest.parent_run, {step: results[0]}, step, plan=False)


def _first_step(run: RunLog, results: Sequence[StepResult], beginning: Checkpoint | None) -> int:
    """Returns the step after which training begins. A checkpoint of the parent counts the parent's steps, not this
    run's."""
    if beginning is None or beginning.state.run_id != run.run_id:
        return results[0].step
    return beginning.state.step


def _recorded_checkpoint(
    settings: Settings, run_id: str, results: Mapping[int, StepResult], wanted: int, *, plan: bool = True
) -> Checkpoint | None:
    """Returns the newest checkpoint of a run up to a step that matches the log: of the run itself, or of an earlier
    replay of it."""

    def is_wanted(state: CheckpointState) -> bool:
        result = results.get(state.step)
        return (
            state.step <= wanted
            and state.run_id == run_id
            and result is not None
            and state.adapter_sha256 == result.adapter_sha256
            and (not plan or state.plan_id == result.plan_id)
        )

    replays = settings.home / "replays"
    # A branch's replay saves the checkpoints of its ancestors in folders below its own.
    roots = [checkpoint_root(settings, run_id), *replays.glob(f"{run_id}-*"), *replays.glob(f"*/{run_id}")]
    checkpoints: list[Checkpoint] = []
    for root in roots:
        checkpoints += read_checkpoints(root)
    found = next(_intact(sorted(checkpoints, key=lambda c: -c.state.step), is_wanted), None)
    step = -1 if found is None else found.state.step
    into = replays / f"{run_id}-stored"
    return fetch_checkpoint(settings, run_id, lambda state: state.step > step and is_wanted(state), into) or found


def _intact(checkpoints: Sequence[Checkpoint], is_wanted: Callable[[CheckpointState], bool]) -> Iterator[Checkpoint]:
    for checkpoint in checkpoints:
        if is_wanted(checkpoint.state):
            try:
                checkpoint.verify()
            except BadCheckpoint as error:
                log.warning("skipped: %s", error)
            else:
                yield checkpoint


def _at_present_offsets(plan: BatchPlan, places: Mapping[str, tuple[int, int]]) -> BatchPlan:
    """Returns the plan with its rollouts at their present offsets, and without those that are missing."""
    return plan.model_copy(update={"rows": tuple(rows_at(plan.rows, places))})
