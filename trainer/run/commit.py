"""The commit of a trained step to the run, in the order that makes every crash safe:

    checkpoint -> verify -> upload -> StepResult -> adapter -> PolicyUpdate -> prune

The checkpoint is uploaded if there is an object store. Each is idempotent: after a crash, everything after the
checkpoint that is not on the log is written again. A commit works on copies, so it runs on a thread (commit_thread.py)
while the next step computes.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from schemas import topics
from schemas.records import BatchPlan, Canary, PolicyUpdate, RunManifest, StepResult
from tentalis.service import tracing
from tentalis.service.settings import Settings
from tentalis.storage.places import adapters_location
from tentalis.text.timestamps import now_ms
from trainer.data.positions import offsets_of
from trainer.model.policy import VersionFiles, adapter_sha256, weights_file
from trainer.run.checkpoint import Checkpoint, CheckpointState, checkpoint_root, save_checkpoint
from trainer.run.prune import Retention, prune
from trainer.run.publish import TransactionalWriter, policy_update, publish_adapter
from trainer.run.rebuild import check_reproduced
from trainer.run.stored_checkpoints import upload_checkpoint
from trainer.step.engine import OptimizerState


@dataclass(frozen=True, slots=True)
class Announcement:
    """Data of a version for its records, besides its checkpoint.

    `result`: the StepResult that is on the log already, else None. `canary`: of the policy with the adapter; None if
    the PolicyUpdate is on the log already. `rank`: the adapter's, 0 for a whole model.
    """

    manifest: RunManifest
    base_model_name: str
    rank: int
    result: StepResult | None
    canary: Canary | None


@dataclass(frozen=True, slots=True)
class Announced:
    """The records of a version; None for one that was on the log already."""

    result: StepResult | None
    update: PolicyUpdate | None


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A trained step as its commit needs it. No later step changes any of it: weights and moments are copies on the
    CPU. `copied_at`: when the copy began, by the clock `time.perf_counter`."""

    plan: BatchPlan
    metrics: dict[str, float]
    seconds: dict[str, float]
    weights: Mapping[str, Tensor]
    version_files: VersionFiles
    optimizer: OptimizerState
    rollouts_topic_id: str | None
    control_topic_ids: dict[str, str] | None
    announcement: Announcement
    retention: Retention
    copied_at: float


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step. `seconds`: of all its phases."""

    plan: BatchPlan
    checkpoint: Checkpoint
    announced: Announced
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


def commit_step(settings: Settings, writer: TransactionalWriter, trained: TrainedStep) -> CommittedStep:
    """Commits a trained step. Raises TrainerFenced, BadCheckpoint, AdapterExists, CannotRebuild, StorageError,
    OSError."""
    plan = trained.plan
    name = step_trace_name(plan.run_id, plan.step, plan.attempt)
    with tracing.span("commit", parent=tracing.derived(name), run_id=plan.run_id, step=plan.step):
        weights = weights_file(trained.weights)
        sha256 = adapter_sha256(weights)
        check_reproduced(trained.announcement.result, plan, sha256)
        state = CheckpointState(
            run_id=plan.run_id,
            policy=plan.policy,
            step=plan.step,
            attempt=plan.attempt,
            plan_id=plan.plan_id,
            owner=plan.owner,
            manifest_digest=plan.manifest_digest,
            low_water=offsets_of(plan.low_water),
            adapter_sha256=sha256,
            optimizer_steps=trained.optimizer.steps,
            metrics=trained.metrics,
            seconds=trained.seconds,
            rollouts_topic_id=trained.rollouts_topic_id,
            control_topic_ids=trained.control_topic_ids,
        )
        root = checkpoint_root(settings, plan.run_id)
        checkpoint = save_checkpoint(root, state, weights, trained.version_files, trained.optimizer)
        saved = {"checkpoint": time.perf_counter() - trained.copied_at}
        announced = announce(settings, writer, checkpoint, trained.announcement, saved)
        prune(settings, trained.retention)
    seconds = {**trained.seconds, "publish": time.perf_counter() - trained.copied_at}
    return CommittedStep(plan, checkpoint, announced, trained.metrics, seconds)


def announce(
    settings: Settings,
    writer: TransactionalWriter,
    checkpoint: Checkpoint,
    announcement: Announcement,
    seconds: Mapping[str, float],
) -> Announced:
    """Uploads a checkpoint, and writes its StepResult, adapter and PolicyUpdate, each only if it is missing. `seconds`:
    phases that the result has besides those of the checkpoint. Raises TrainerFenced, AdapterExists, StorageError,
    OSError."""
    state, manifest = checkpoint.state, announcement.manifest
    upload_checkpoint(settings, checkpoint)
    traceparent = tracing.derived(step_trace_name(state.run_id, state.step, state.attempt)) if state.step else None
    version = manifest.first_version + state.step
    result = update = None
    if announcement.result is None:
        result = StepResult(
            run_id=state.run_id,
            step=state.step,
            attempt=state.attempt,
            plan_id=state.plan_id,
            event_time=now_ms(),
            policy=manifest.policy,
            policy_version=version,
            adapter_sha256=state.adapter_sha256,
            metrics=state.metrics,
            seconds={**state.seconds, **seconds},
            owner=state.owner,
        )
        writer.write(topics.BATCHES, result, traceparent)
    place = publish_adapter(adapters_location(settings, manifest.policy), version, checkpoint)
    if announcement.canary is not None:
        update = policy_update(
            manifest, checkpoint, place, announcement.canary, announcement.rank, announcement.base_model_name
        )
        writer.write(topics.POLICIES, update, traceparent)
    return Announced(result, update)


def step_trace_name(run_id: str, step: int, attempt: int) -> str:
    """Returns the name of a step in traces."""
    return f"{run_id}/{step}/{attempt}"
