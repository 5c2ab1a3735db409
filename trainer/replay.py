"""Replay: a recorded run trained again from its topics, compared step by step.

Everything is read and verified before anything is trained. Steps that share a manifest are trained by one world of the
size that the manifest names, from a checkpoint in the replay's own folder; nothing is published.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from schemas.codec import Codec
from schemas.records import BatchPlan, RunManifest, StepResult
from tentalis.config import Settings
from tentalis.inference.models import model_digest, resolve_model
from tentalis.kafka import make_codec
from trainer import runtime
from trainer.checkpoint import Checkpoint, CheckpointState, save
from trainer.config import TrainerConfig
from trainer.config_file import parse_config
from trainer.fetch import BadRollouts, Cache, examine, fetch
from trainer.runlog import RunLog, read_run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One step of a replayed run. When nothing was trained (verify_only) `replayed_sha` is empty and `equal` None.

    `left_out` says which of its rollouts were not there. From the first such step on another thing was trained than the
    run trained, and `equal` is None.
    """

    step: int
    recorded_sha: str
    replayed_sha: str
    equal: bool | None
    left_out: tuple[str, ...] = ()


class CannotReplay(RuntimeError):
    """The log does not hold what a replay needs; the message says what."""


class Job(BaseModel):
    """What the ranks of a replay do: the plans of one manifest, from a checkpoint or (None) from the initial
    adapter."""

    model_config = ConfigDict(frozen=True)

    manifest: RunManifest
    config: TrainerConfig
    model_folder: Path
    plans: tuple[BatchPlan, ...]
    checkpoint: Path | None
    into: Path


class Done(BaseModel):
    """What they return: the sha256 after each step, and the checkpoint after the last."""

    sha256: dict[int, str]
    checkpoint: Path


def replay(
    run_id: str,
    settings: Settings,
    *,
    from_step: int = 0,
    to_step: int | None = None,
    into: Path | None = None,
    verify_only: bool = False,
    base_model: str | None = None,
    allow_missing: bool = False,
    unreadable: list[str] | None = None,
) -> list[ReplayStep]:
    """Trains the steps of a run again, from its first to `to_step` (default: the last), and compares those from
    `from_step`.

    `into` is the replay's folder (default: a new one below STATE/replays); `base_model` says where the base model is if
    not where the run's configuration says. With `verify_only` the rollouts are checked and nothing is trained. With
    `allow_missing` the steps are trained without the rollouts that are missing or forgotten. What lies on the topics
    and is no record is passed over and added to `unreadable`, with its place and the reason.
    Raises CannotReplay, and BadRollouts with every missing, forgotten and forged rollout by name.
    """
    codec = make_codec(settings)
    run = read_run(settings, codec, run_id)
    passed_over = [] if unreadable is None else unreadable
    passed_over += run.unreadable
    results, own = recorded(run, to_step)
    before = ancestors(settings, codec, run)
    plans = [*(plan for each in before for plan in each.plans), *own]
    problems = examine(settings, codec, [row for plan in plans for row in plan.rows], passed_over)
    if any(problem.kind == "forged" or not allow_missing for problem in problems):
        raise BadRollouts(problems)
    gone = {problem.rollout_id: str(problem) for problem in problems}
    left_out = {p.step: tuple(gone[r.rollout_id] for r in p.rows if r.rollout_id in gone) for p in own}
    inherited_gap = any(row.rollout_id in gone for plan in plans[: len(plans) - len(own)] for row in plan.rows)
    plans = [_without(plan, gone) for plan in plans]
    shown = [result for result in results if result.step >= from_step]
    if not shown:
        raise CannotReplay(f"run {run_id} has steps 0 to {results[-1].step}; there is nothing from step {from_step} on")
    if verify_only:
        return [
            ReplayStep(result.step, result.adapter_sha256, "", None, left_out.get(result.step, ())) for result in shown
        ]
    if into is None:
        (settings.home / "replays").mkdir(parents=True, exist_ok=True)
        into = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=settings.home / "replays"))
    sha256: dict[int, str] = {}
    checkpoint: Path | None = None
    manifests = [(each.first, each.manifests) for each in before] + [(run.first, run.manifests)]
    for manifest, group in _segments(manifests, plans):
        config = parse_config(manifest.config, f"the manifest {manifest.digest} of run {run_id}")
        folder = resolve_model(base_model or config.base_model, settings.cache)
        _warn_of_differences(manifest, folder, config)
        job = Job(manifest=manifest, config=config, model_folder=folder, plans=group, checkpoint=checkpoint, into=into)
        done = _execute(job, settings, codec)
        if manifest.run_id == run_id:
            sha256 |= done.sha256
        else:
            sha256[0] = done.sha256[max(done.sha256)]
        checkpoint = done.checkpoint
    same_until = min((step for step, reasons in left_out.items() if reasons), default=results[-1].step + 1)
    if inherited_gap:
        same_until = 0
    return [
        ReplayStep(
            r.step,
            r.adapter_sha256,
            sha256[r.step],
            r.adapter_sha256 == sha256[r.step] if r.step < same_until else None,
            left_out.get(r.step, ()),
        )
        for r in shown
    ]


def recorded(run: RunLog, to_step: int | None) -> tuple[list[StepResult], list[BatchPlan]]:
    """The results of steps 0 .. to_step and the winning plans of 1 .. to_step. Raises CannotReplay."""
    if not run.manifests:
        known = ", ".join(sorted(run.other_runs)) or "none"
        raise CannotReplay(f"the log knows no run {run.run_id!r}; runs there: {known}")
    last = run.last_step if to_step is None else to_step
    if last > run.last_step:
        raise CannotReplay(f"run {run.run_id} has results up to step {run.last_step}, not {last}")
    results: list[StepResult] = []
    plans: list[BatchPlan] = []
    for step in range(last + 1):
        result = run.winner(step)
        if result is None:
            raise CannotReplay(f"the result of step {step} of run {run.run_id} is not on the log")
        results.append(result)
        if step == 0:
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
    return results, plans


def _without(plan: BatchPlan, gone: Collection[str]) -> BatchPlan:
    return plan.model_copy(update={"rows": tuple(row for row in plan.rows if row.rollout_id not in gone)})


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a run has from an earlier one: that one's manifests, and its plans up to where the ways parted."""

    first: RunManifest | None
    manifests: dict[str, RunManifest]
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
        found.insert(0, Inherited(run.first, run.manifests, plans))
    return found


def _segments(
    manifests: Sequence[tuple[RunManifest | None, dict[str, RunManifest]]], plans: Sequence[BatchPlan]
) -> Iterator[tuple[RunManifest, tuple[BatchPlan, ...]]]:
    """Consecutive plans of one manifest; without any plan it is the oldest run's first manifest."""
    oldest = manifests[0][0]
    if not plans and oldest is not None:
        yield oldest, ()
    known = {digest: manifest for _, of in manifests for digest, manifest in of.items()}
    for digest, group in groupby(plans, key=lambda plan: plan.manifest_digest):
        yield known[digest], tuple(group)


def _warn_of_differences(manifest: RunManifest, model_folder: Path, config: TrainerConfig) -> None:
    """Raises CannotReplay for another base model; everything else that differs may still give the same bytes."""
    digest = model_digest(model_folder)
    if digest != manifest.base_sha256:
        raise CannotReplay(
            f"the base model in {model_folder} has sha256 {digest}, the run was trained on {manifest.base_sha256}. "
            "Name the right one with --base-model"
        )
    device = runtime.device_of(config)
    here = runtime.versions(manifest.versions) | {"device": device, "instruction set": runtime.instruction_set(device)}
    then = manifest.versions | {"device": manifest.device, "instruction set": manifest.instruction_set}
    for name, value in then.items():
        if here[name] != value:
            log.warning("%s differs: the run had %s, here it is %s; the bytes may differ", name, value, here[name])


def _execute(job: Job, settings: Settings, codec: Codec) -> Done:
    if job.manifest.world_size == 1:
        return _train(job, settings, codec)
    from trainer.launch import spawn

    job.into.mkdir(parents=True, exist_ok=True)
    spec = job.into / f"job-{job.plans[0].step if job.plans else 0}.json"
    spec.write_text(job.model_dump_json(), encoding="utf-8")
    code = spawn(["replay-rank", "--spec", str(spec)], job.manifest.world_size, settings, exit_code=1)
    if code:
        raise CannotReplay(f"the replay's ranks ended with exit code {code}; their messages are above")
    return Done.model_validate_json(_done_path(spec).read_bytes())


def _done_path(spec: Path) -> Path:
    return spec.with_suffix(".done.json")


def replay_rank(spec: Path) -> int:
    """One rank of a replay in several processes; rank 0 leaves the results beside `spec`."""
    settings = Settings.from_env()
    done = _train(Job.model_validate_json(spec.read_bytes()), settings, make_codec(settings))
    from trainer import world

    if world.join().rank == 0:
        _done_path(spec).write_text(done.model_dump_json(), encoding="utf-8")
    return 0


def _train(job: Job, settings: Settings, codec: Codec) -> Done:
    """Every rank of the replay's world. Only rank 0 writes."""
    from trainer import world as worlds
    from trainer.engine import Engine
    from trainer.model import adapter_sha256
    from trainer.step import train_step
    from trainer.stop import stop_on_signals
    from trainer.world import Channel

    world, manifest = worlds.join(), job.manifest
    device = runtime.device_of(job.config)
    runtime.prepare(manifest.threads, device)
    engine = Engine(job.config, job.model_folder, world, device)
    channel = Channel(world)
    sha256: dict[int, str] = {}
    if job.checkpoint is not None:
        checkpoint = Checkpoint.read(job.checkpoint)
        engine.load(checkpoint.adapter(), checkpoint.optimizer())
    else:
        sha256[0] = adapter_sha256(engine.policy.adapter_bytes())
    with stop_on_signals(exit_code=1) as stop:
        for plan in job.plans:
            rollouts = fetch(settings, codec, [row for row in plan.rows if row.rank == world.rank], Cache())
            channel.gather(f"ready/{plan.step}", stop.check)
            train_step(engine, plan, manifest.first_version + plan.step - 1, rollouts, job.config.loss, world, stop)
            sha256[plan.step] = adapter_sha256(engine.policy.adapter_bytes())
            log.info("step %d: %s", plan.step, sha256[plan.step])
    last = max(sha256)
    adapter = engine.policy.adapter_bytes()
    state = CheckpointState(
        run_id=manifest.run_id,
        policy=manifest.policy,
        step=last,
        attempt=job.plans[-1].attempt if job.plans else 0,
        plan_id=job.plans[-1].plan_id if job.plans else None,
        owner="replay",
        manifest_digest=manifest.digest,
        low_water={},
        adapter_sha256=sha256[last],
        optimizer_steps=engine.optimizer_state().steps,
        metrics={},
        seconds={},
    )
    folder = job.into / state.folder_name
    if world.rank == 0:
        folder = save(job.into, state, adapter, engine.policy.adapter_config(), engine.optimizer_state()).folder
    return Done(sha256=sha256, checkpoint=folder)


def main(
    settings: Settings,
    run_id: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    into: Path | None = None,
    verify_only: bool = False,
    base_model: str | None = None,
    allow_missing: bool = False,
    as_json: bool = False,
) -> int:
    """`tentalis replay`: prints one table or one JSON object to stdout and returns the exit code, 0 only if all is
    equal."""
    steps: list[ReplayStep] = []
    problems: list[str] = []
    unreadable: list[str] = []
    try:
        steps = replay(
            run_id,
            settings,
            from_step=from_step or 0,
            to_step=to_step,
            into=into,
            verify_only=verify_only,
            base_model=base_model,
            allow_missing=allow_missing,
            unreadable=unreadable,
        )
    except BadRollouts as error:
        problems = [str(problem) for problem in error.problems]
        if all(problem.kind in ("missing", "forgotten") for problem in error.problems):
            print("--allow-missing trains without the rollouts that are missing or forgotten", file=sys.stderr)
    except CannotReplay as error:
        problems = [str(error)]
    equal = not problems and all(step.equal is not False for step in steps)
    left_out = [reason for step in steps for reason in step.left_out]
    if as_json:
        json.dump(
            {
                "run_id": run_id,
                "equal": None if equal and any(step.equal is None for step in steps) else equal,
                "problems": problems,
                "left_out": left_out,
                "unreadable": unreadable,
                "steps": [asdict(step) for step in steps],
            },
            sys.stdout,
        )
        sys.stdout.write("\n")
    else:
        for line in unreadable:
            print(f"passed over, no record: {line}")
        _print_table(run_id, steps, problems, equal, verify_only)
    return 0 if equal else 1


def _print_table(
    run_id: str, steps: Sequence[ReplayStep], problems: Sequence[str], equal: bool, verified: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(problem, markup=False)
    if problems:
        console.print(f"Run {run_id} cannot be replayed: nothing was trained.")
        return
    table = Table(title=f"Run {run_id}", title_justify="left")
    for column in ("step", "recorded sha256", "replayed sha256", "equal"):
        table.add_column(column, no_wrap=True)
    for step in steps:
        verdict = "not trained" if verified else "-" if step.equal is None else "yes" if step.equal else "NO"
        table.add_row(str(step.step), step.recorded_sha[:16], step.replayed_sha[:16], verdict)
    console.print(table)
    left_out = [reason for step in steps for reason in step.left_out]
    for reason in left_out:
        console.print(f"left out: {reason}", markup=False)
    if verified and not left_out:
        console.print(f"Every rollout of {len(steps)} steps is there and unaltered.")
    elif any(step.equal is None for step in steps) and not verified:
        console.print("Trained without what is not there: the steps marked - are not those of the run.")
    elif not verified:
        console.print("Every step is equal." if equal else "Not every step is equal.")
