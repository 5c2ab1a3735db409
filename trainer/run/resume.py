"""Recovers the run's position on rank 0: the run itself, the checkpoint that the log confirms, the consumed
rollouts."""

import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from schemas import topics
from schemas.records import BatchPlan, RunManifest
from schemas.wire.codec import Codec
from tentalis.policies.lineage import Node
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings
from tentalis.storage.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_WEIGHTS
from trainer.advantages.baseline import RunningBaseline
from trainer.config.trainer_config import TrainerConfig
from trainer.distributed.environment import CONFIG_FILE as BASE_CONFIG
from trainer.model.policy import adapter_sha256
from trainer.run.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    CheckpointState,
    checkpoint_root,
    read_checkpoints,
    save_checkpoint,
    set_aside,
)
from trainer.run.control_topics import check_control_topics, check_without_checkpoint, control_topic_ids
from trainer.run.manifest import manifest_of, start_positions
from trainer.run.publish import TransactionalWriter
from trainer.run.rebuild import recorded_plan
from trainer.run.rollback import (
    CannotBranch,
    branch_start,
    checkpoint_of,
    current_run,
    due_rollback,
    last_version_if_overtaken,
    new_branch,
    parent_of,
)
from trainer.run.rollouts_topic import start_topic_id
from trainer.run.run_log import RunLog, plans_trained_by
from trainer.run.state import RunState
from trainer.run.stored_checkpoints import fetch_checkpoint
from trainer.step.engine import OptimizerState, TrainingEngine

log = logging.getLogger(__name__)

NO_MOMENTS = OptimizerState({}, 0)
# Keys of adapter_config.json that change the meaning of the same weights.
SHAPE_KEYS = ("r", "lora_alpha", "target_modules")


class CannotResume(Unmendable):
    """The run cannot be resumed: the log contradicts the configuration."""


def is_confirmed(checkpoint: Checkpoint, run: RunLog) -> bool:
    """True if a checkpoint is the result of the latest plan on the log for its step. Transactions do not fence a
    zombie's rename, so the existence of a checkpoint proves nothing."""
    return _confirms(run, checkpoint.state)


def _confirms(run: RunLog, state: CheckpointState) -> bool:
    if state.step == 0:
        return any(m.digest == state.manifest_digest for m in run.manifests.values())
    plan = run.latest_plan(state.step)
    return plan is not None and (plan.attempt, plan.owner, plan.plan_id) == (state.attempt, state.owner, state.plan_id)


def resume_point(root: Path, run: RunLog) -> tuple[Checkpoint | None, list[BadCheckpoint]]:
    """Returns the newest intact checkpoint below `root` that the log confirms, None if there is none, and the damaged
    ones that were found on the way. The log may be ahead of it: see rebuild.py."""
    damaged: list[BadCheckpoint] = []
    for checkpoint in read_checkpoints(root, damaged):
        if not is_confirmed(checkpoint, run):
            continue
        try:
            checkpoint.verify()
        except BadCheckpoint as error:
            damaged.append(error)
        else:
            return checkpoint, damaged
    return None, damaged


def newest_checkpoint(settings: Settings, run: RunLog) -> tuple[Checkpoint | None, list[BadCheckpoint]]:
    """Returns the resume point on this machine, or the one in the object store if that is newer, and the damaged
    checkpoints on this machine."""
    root = checkpoint_root(settings, run.run_id)
    checkpoint, damaged = resume_point(root, run)
    step = -1 if checkpoint is None else checkpoint.state.step
    fetched = fetch_checkpoint(settings, run.run_id, lambda state: state.step > step and _confirms(run, state), root)
    if fetched is None:
        return checkpoint, damaged
    return fetched, [error for error in damaged if error.folder != fetched.folder]


def _fall_back(run: RunLog, root: Path, step: int, damaged: list[BadCheckpoint]) -> None:
    """Moves the damaged checkpoints away and logs the position from which the run continues."""
    lost = [f"{error}; moved to {set_aside(error)}" for error in damaged]
    if not lost and run.last_step > step:
        lost = [f"below {root} is no checkpoint of step {run.last_step} that belongs to the log"]
    if not lost:
        return
    again = ""
    if run.last_step > step:
        steps = f"step {run.last_step}" if run.last_step == step + 1 else f"steps {step + 1} to {run.last_step}"
        again = f", and trains {steps} again from the log. The adapters must be the recorded ones"
    log.warning("%s. Run %s continues from step %d%s", "; ".join(lost), run.run_id, step, again)


def resume(
    settings: Settings,
    config: TrainerConfig,
    codec: Codec,
    engine: TrainingEngine,
    world_size: int,
    model_folder: Path,
) -> RunState:
    """Takes over the policy, loads the newest intact checkpoint that the log confirms (or makes the first one) into the
    engine, and writes the records that are missing for it. After a rollback it starts a new run. Raises CannotResume,
    TopicLost, CannotRebuild, CannotBranch, BadAdapter, ValueError (another adapter shape)."""
    writer = TransactionalWriter(settings, codec, config.policy)
    # Reads the log only now, when a predecessor's open transaction is committed or aborted.
    run = current_run(settings, codec, config)
    if run.first_manifest is not None and run.first_manifest.policy != config.policy:
        raise CannotResume(
            f"run {config.run_id} trains {run.first_manifest.policy}, not {config.policy}: use another run_id for it"
        )
    parent, start, abandoned = parent_of(run), start_positions(config, run, settings), None
    target, cause = due_rollback(run), "rolled back to"
    if target is None:
        target, cause = last_version_if_overtaken(run, config.steps), "another run of the policy has begun after"
    if target is not None:
        parent, start = Node(target.run_id, target.step), branch_start(settings, codec, run)
        abandoned = run.run_id
        run = new_branch(run, config.run_id)
        log.warning("%s %s: run %s starts from step %d of run %s", cause, target.name, run.run_id, *parent[::-1])
    config = config.model_copy(update={"run_id": run.run_id})
    root = checkpoint_root(settings, config.run_id)
    topic_ids = control_topic_ids(settings)
    check_control_topics(run, (each.state for each in read_checkpoints(root, [])), topic_ids)
    checkpoint, damaged = newest_checkpoint(settings, run)
    if checkpoint is None or checkpoint.state.rollouts_topic_id is None:
        check_without_checkpoint(settings)
    # The first offsets of a run that has begun are those of its manifest, which does not have the id.
    begun = run.first_manifest is not None
    started_on = None if begun or checkpoint is not None else start_topic_id(settings, abandoned)
    origin = checkpoint_of(settings, run, parent) if parent is not None and checkpoint is None else None
    source = origin or checkpoint
    # Only the start of a run needs the initial adapter: its folder may be gone later.
    weights, moments = (
        (engine.load_initial_weights(), NO_MOMENTS) if source is None else (source.weights(), source.optimizer())
    )
    initial_sha256 = adapter_sha256(weights)
    sha256 = initial_sha256 if run.first_manifest is None else run.first_manifest.initial_adapter_sha256
    if source is None and initial_sha256 != sha256:
        raise CannotResume(
            f"run {config.run_id} began with the adapter {sha256} and has no usable checkpoint, but seed, lora and "
            f"initial_adapter now give {initial_sha256}. Restore these settings or a checkpoint, or start a new run "
            "under another run_id"
        )
    manifest = manifest_of(config, run, model_folder, sha256, world_size, start, parent)
    if source is not None:
        # Before anything is written: an unusable origin must not create a run that cannot begin.
        _check_fits(source, run, manifest, engine)
    step = 0 if checkpoint is None else checkpoint.state.step
    if run.last_step > step:
        recorded_plan(run, step + 1, manifest.digest)
    _fall_back(run, root, step, damaged)
    if manifest.digest not in run.manifests:
        writer.write(topics.RUNS, manifest)
        run.manifests[manifest.digest] = manifest
        run.relatives = (*run.relatives, manifest)
    owner = uuid.uuid4().hex
    if checkpoint is None:
        first_state = _initial_state(manifest, owner, start, sha256, moments.steps, source, started_on)
        checkpoint = save_checkpoint(root, first_state, weights, engine.policy.files(), moments)
    engine.restore(weights, moments)
    log.info("run %s continues after step %d", config.run_id, checkpoint.state.step)
    state = RunState(settings, config, engine, run, writer, manifest, owner, checkpoint, run.lineage)
    state.control_topic_ids = topic_ids
    state.announce_checkpoint()
    return state


def _check_fits(checkpoint: Checkpoint, run: RunLog, manifest: RunManifest, engine: TrainingEngine) -> None:
    """Raises CannotBranch if the checkpoint belongs to another base model or config.json of it, or was trained with
    another `lora`."""
    state = checkpoint.state
    differences = []
    relatives = [relative for relative in run.relatives if relative.run_id == state.run_id]
    if relatives and manifest.base_sha256 not in {relative.base_sha256 for relative in relatives}:
        differences.append("was trained on another base model")
    # The same weights under another config.json are another policy, and manifests of earlier releases do not tell.
    recorded = {each.environment[BASE_CONFIG] for each in relatives if BASE_CONFIG in each.environment}
    if recorded and manifest.environment[BASE_CONFIG] not in recorded:
        differences.append(f"was trained with other settings in the {BASE_CONFIG} of its base model")
    files = engine.policy.files()
    if checkpoint.weights_name != files.weights:
        kinds = {ADAPTER_WEIGHTS: "an adapter", MODEL_WEIGHTS: "the whole model (`lora: null`)"}
        then, now = kinds[checkpoint.weights_name], kinds[files.weights]
        differences.append(f"trained {then}, where the configuration now trains {now}")
    elif files.weights == ADAPTER_WEIGHTS:
        shape = json.loads((checkpoint.folder / ADAPTER_CONFIG).read_bytes())
        own = json.loads(files.others[ADAPTER_CONFIG])
        differences += [f"has {name} {shape[name]}, not {own[name]}" for name in SHAPE_KEYS if shape[name] != own[name]]
    if differences:
        raise CannotBranch(
            f"run {manifest.run_id} cannot start from step {state.step} of run {state.run_id}, which "
            f"{' and '.join(differences)}. Restore base_model and lora, roll back to a version trained with the "
            "present ones, or start a new run under another run_id"
        )


def consumed_plans(state: RunState, codec: Codec) -> list[BatchPlan]:
    """Returns the plans whose rollouts are consumed: those of all steps that other runs of the family have trained,
    then those of the run's own complete steps."""
    relatives = set(state.lineage.family(state.run.run_id)) - {state.run.run_id}
    others = plans_trained_by(state.settings, codec, relatives) if relatives else []
    own = (state.run.latest_plan(step) for step in range(1, state.step + 1))
    return [*others, *(plan for plan in own if plan is not None)]


def _initial_state(
    manifest: RunManifest,
    owner: str,
    start: Mapping[int, int],
    sha256: str,
    optimizer_steps: int,
    origin: Checkpoint | None,
    topic_id: str | None,
) -> CheckpointState:
    """Returns the state of step 0. A branch keeps the baseline of the step that it begins at, its `origin`."""
    return CheckpointState(
        run_id=manifest.run_id,
        policy=manifest.policy,
        step=0,
        attempt=0,
        plan_id=None,
        owner=owner,
        manifest_digest=manifest.digest,
        low_water=dict(start),
        adapter_sha256=sha256,
        optimizer_steps=optimizer_steps,
        metrics={} if origin is None else RunningBaseline.of_metrics(origin.state.metrics).metrics(),
        seconds={},
        rollouts_topic_id=topic_id,
    )
