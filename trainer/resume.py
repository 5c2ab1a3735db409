"""How rank 0 finds where its run stands: which run it is, which checkpoint the log vouches for, what is used up."""

import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from schemas import topics
from schemas.codec import Codec
from schemas.records import RunManifest
from tentalis.config import Settings
from tentalis.lineage import Node
from tentalis.service import Unmendable
from trainer.branch import (
    CannotBranch,
    branched,
    checkpoint_of,
    current_run,
    due_rollback,
    overtaken,
    parent_of,
    start_of_branch,
)
from trainer.checkpoint import Checkpoint, CheckpointState, checkpoint_root, checkpoints, save
from trainer.config import TrainerConfig
from trainer.engine import Engine, OptimizerState
from trainer.head import Head
from trainer.manifest import manifest_of, start_positions
from trainer.model import CONFIG_FILE, adapter_sha256
from trainer.publish import Ledger
from trainer.runlog import RunLog, trained_by

log = logging.getLogger(__name__)

NO_MOMENTS = OptimizerState({}, 0)
# Of adapter_config.json: what the same weights mean.
SHAPE = ("r", "lora_alpha", "target_modules")


class CannotResume(Unmendable):
    """The log knows more of the run than the state directory."""


def believed(checkpoint: Checkpoint, run: RunLog) -> bool:
    """Whether a checkpoint is the result of the latest plan on the log for its step. Transactions do not fence a
    zombie's rename, so a checkpoint proves nothing by being there."""
    state = checkpoint.state
    if state.step == 0:
        return any(m.digest == state.manifest_digest for m in run.manifests.values())
    plan = run.latest_plan(state.step)
    return plan is not None and (plan.attempt, plan.owner, plan.plan_id) == (state.attempt, state.owner, state.plan_id)


def resume_point(found: list[Checkpoint], run: RunLog, root: Path) -> Checkpoint | None:
    """The checkpoint to go on from, None for a run that has none and needs none. Raises CannotResume."""
    newest = next((checkpoint for checkpoint in found if believed(checkpoint, run)), None)
    reached = -1 if newest is None else newest.state.step
    if run.last_step > reached:
        raise CannotResume(
            f"the log has a result for step {run.last_step} of run {run.run_id}, but below {root} the newest "
            f"checkpoint that belongs to the log is {'none' if newest is None else f'of step {reached}'}. "
            "Start it where its state directory is, restore that directory, or start a new run under another run_id"
        )
    return newest


def resume(
    settings: Settings,
    config: TrainerConfig,
    codec: Codec,
    engine: Engine,
    world_size: int,
    model_folder: Path,
) -> Head:
    """Takes the policy over, loads the newest checkpoint that the log vouches for into the engine, or makes the first
    one, and writes what is missing for it. After a rollback that is a new run. Raises CannotResume, CannotBranch,
    BadCheckpoint, BadAdapter, ValueError (another adapter shape)."""
    ledger = Ledger(settings, codec, config.policy)
    # Only now: what a predecessor had in flight is committed or aborted.
    run = current_run(settings, codec, config)
    if run.first is not None and run.first.policy != config.policy:
        raise CannotResume(
            f"run {config.run_id} trains {run.first.policy}, not {config.policy}: a policy needs runs of its own"
        )
    parent, start = parent_of(run), start_positions(config, run, settings)
    target, why = due_rollback(run), "rolled back to"
    if target is None:
        target, why = overtaken(run, config.steps), "another run of the policy has begun after"
    if target is not None:
        parent, start = Node(target.run_id, target.step), start_of_branch(run)
        run = branched(run, config.run_id)
        log.warning("%s %s: run %s goes on from step %d of run %s", why, target.name, run.run_id, *parent[::-1])
    config = config.model_copy(update={"run_id": run.run_id})
    root = checkpoint_root(settings, config.run_id)
    checkpoint = resume_point(checkpoints(root), run, root)
    origin = checkpoint_of(settings, run, parent) if parent is not None and checkpoint is None else None
    before = origin or checkpoint
    # Only where it begins does a run need what it begins with: the folder may be gone later.
    weights, moments = (engine.begin(), NO_MOMENTS) if before is None else (before.adapter(), before.optimizer())
    given = adapter_sha256(weights)
    sha256 = given if run.first is None else run.first.initial_adapter_sha256
    if before is None and given != sha256:
        raise CannotResume(
            f"run {config.run_id} began with the adapter {sha256} and ended before it had a checkpoint, and seed, lora "
            f"and initial_adapter give {given} now. Set them as they were, or begin a run under "
            "another run_id"
        )
    manifest = manifest_of(config, run, model_folder, sha256, world_size, start, parent)
    if before is not None:
        # Before anything is written: what cannot be gone on from must not become a run that cannot begin.
        _check_fits(before, run, manifest, engine)
    if manifest.digest not in run.manifests:
        ledger.write(topics.RUNS, manifest)
        run.manifests[manifest.digest] = manifest
        run.relatives = (*run.relatives, manifest)
    owner = uuid.uuid4().hex
    if checkpoint is None:
        state = _first_state(manifest, owner, start, sha256, moments.steps)
        checkpoint = save(root, state, weights, engine.policy.adapter_config(), moments)
    engine.load(weights, moments)
    log.info("run %s goes on after step %d", config.run_id, checkpoint.state.step)
    head = Head(settings, config, engine, run, ledger, manifest, owner, checkpoint, run.lineage)
    head.announce({})
    return head


def _check_fits(checkpoint: Checkpoint, run: RunLog, manifest: RunManifest, engine: Engine) -> None:
    """Raises CannotBranch if what is to be gone on from has another base model, or was trained with another `lora`."""
    state = checkpoint.state
    wrong = []
    bases = {other.base_sha256 for other in run.relatives if other.run_id == state.run_id}
    if bases and manifest.base_sha256 not in bases:
        wrong.append("was trained on another base model")
    then = json.loads((checkpoint.folder / CONFIG_FILE).read_bytes())
    now = json.loads(engine.policy.adapter_config())
    wrong += [f"has {name} {then[name]}, not {now[name]}" for name in SHAPE if then[name] != now[name]]
    if wrong:
        raise CannotBranch(
            f"run {manifest.run_id} cannot go on from step {state.step} of run {state.run_id}, which "
            f"{' and '.join(wrong)}. Set base_model and lora as they were, roll back to a version that has them so, or "
            "begin a run under another run_id"
        )


def consumed(head: Head, codec: Codec) -> dict[str, str]:
    """Key and digest of every rollout that is used up: by the run's own complete steps, and by all that any other run
    of the family has trained."""
    relatives = set(head.lineage.family(head.run.run_id)) - {head.run.run_id}
    found = trained_by(head.settings, codec, relatives) if relatives else {}
    return found | {
        row.rollout_id: row.digest
        for step in range(1, head.step + 1)
        if (plan := head.run.latest_plan(step)) is not None
        for row in plan.rows
    }


def _first_state(
    manifest: RunManifest, owner: str, start: Mapping[int, int], sha256: str, optimizer_steps: int
) -> CheckpointState:
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
        metrics={},
        seconds={},
    )
