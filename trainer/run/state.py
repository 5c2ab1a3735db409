"""The position of a run, and the commit of a step to it, in the order that makes every crash safe:

    checkpoint -> verify -> upload -> StepResult -> adapter -> PolicyUpdate

The checkpoint is uploaded if there is an object store. Each is idempotent: after a crash, everything after the
checkpoint that is not on the log is written again.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schemas import topics
from schemas.records import BatchPlan, RunManifest, StepResult
from tentalis.policies.lineage import Lineage, Node
from tentalis.service import tracing
from tentalis.service.settings import Settings
from tentalis.storage.places import adapters_location
from tentalis.text.timestamps import now_ms
from trainer.config.trainer_config import TrainerConfig
from trainer.data.plan import PlanContext
from trainer.data.positions import offsets_of
from trainer.model.model import adapter_sha256
from trainer.run.checkpoint import (
    Checkpoint,
    CheckpointState,
    checkpoint_root,
    read_checkpoints,
    remove_checkpoints,
    remove_leftovers,
    save_checkpoint,
)
from trainer.run.publish import TransactionalWriter, policy_update, prune_adapters, publish_adapter
from trainer.run.rebuild import check_reproduced
from trainer.run.retention import versions_to_keep
from trainer.run.run_log import RunLog
from trainer.run.stored_checkpoints import is_remote, remove_stored, stored_steps, upload_checkpoint
from trainer.step.engine import TrainingEngine
from trainer.step.step import StepOutput


@dataclass(slots=True)
class RunState:
    """A run at its last complete step; the engine holds its `checkpoint`. `config` has the id of the run, which after a
    rollback differs from the id in the file."""

    settings: Settings
    config: TrainerConfig
    engine: TrainingEngine
    run: RunLog
    writer: TransactionalWriter
    manifest: RunManifest
    owner: str
    checkpoint: Checkpoint
    lineage: Lineage
    rollouts_topic_id: str | None = None
    """Kafka's id of the rollouts topic, which the checkpoints record."""
    control_topic_ids: dict[str, str] | None = None
    """Kafka's ids of the control topics, which the checkpoints record."""

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.checkpoint.state.step

    @property
    def version(self) -> int:
        """The version of the last complete step."""
        return self.manifest.first_version + self.step

    @property
    def depth(self) -> int:
        """Steps since the initial adapter of the family's first run."""
        return self.lineage.depth(Node(self.run.run_id, self.step))

    @property
    def steps_ahead(self) -> int:
        """Steps ahead of the served version; all steps of the run while none is served."""
        served = None if self.run.promoted_version is None else self.lineage.node(self.run.promoted_version)
        distance = None if served is None else self.lineage.distance(Node(self.run.run_id, self.step), served)
        return self.step if distance is None else distance

    @property
    def plan_context(self) -> PlanContext:
        """The fields that all plans of this process share."""
        config, manifest = self.config, self.manifest
        return PlanContext(
            config.run_id,
            config.policy,
            manifest.digest,
            manifest.world_size,
            config.micro_batch_tokens,
            config.seed,
            self.owner,
            config.loss.pair.weight > 0,
        )

    def write_plan(self, plan: BatchPlan) -> BatchPlan:
        """Writes a plan to the log. Raises TrainerFenced."""
        self.writer.write(topics.BATCHES, plan)
        return plan

    def commit(self, plan: BatchPlan, output: StepOutput, fetch_seconds: float) -> dict[str, float]:
        """Commits a trained step: checkpoint, result, adapter, announcement. Returns the seconds of all its phases.
        Raises TrainerFenced, BadCheckpoint, AdapterExists, CannotRebuild."""
        started_at = time.perf_counter()
        adapter, optimizer = self.engine.policy.adapter_bytes(), self.engine.optimizer_state()
        check_reproduced(self.run, plan, adapter_sha256(adapter))
        state = CheckpointState(
            run_id=plan.run_id,
            policy=plan.policy,
            step=plan.step,
            attempt=plan.attempt,
            plan_id=plan.plan_id,
            owner=plan.owner,
            manifest_digest=plan.manifest_digest,
            low_water=offsets_of(plan.low_water),
            adapter_sha256=adapter_sha256(adapter),
            optimizer_steps=optimizer.steps,
            metrics=output.metrics,
            seconds=output.seconds | {"fetch": fetch_seconds},
            rollouts_topic_id=self.rollouts_topic_id,
            control_topic_ids=self.control_topic_ids,
        )
        root = checkpoint_root(self.settings, plan.run_id)
        self.checkpoint = save_checkpoint(root, state, adapter, self.engine.policy.adapter_config(), optimizer)
        self.announce({"checkpoint": time.perf_counter() - started_at})
        self._prune()
        return state.seconds | {"publish": time.perf_counter() - started_at}

    def announce(self, seconds: Mapping[str, float]) -> None:
        """Uploads the checkpoint, and writes its StepResult, adapter and PolicyUpdate, each only if it is missing."""
        checkpoint, state, policy = self.checkpoint, self.checkpoint.state, self.config.policy
        upload_checkpoint(self.settings, checkpoint)
        traceparent = tracing.derived(step_trace_name(state.run_id, state.step, state.attempt)) if state.step else None
        version = self.version
        if (state.step, state.attempt) not in self.run.results:
            result = StepResult(
                run_id=state.run_id,
                step=state.step,
                attempt=state.attempt,
                plan_id=state.plan_id,
                event_time=now_ms(),
                policy=policy,
                policy_version=version,
                adapter_sha256=state.adapter_sha256,
                metrics=state.metrics,
                seconds={**state.seconds, **seconds},
                owner=state.owner,
            )
            self.writer.write(topics.BATCHES, result, traceparent)
            self.run.results[state.step, state.attempt] = result
        place = publish_adapter(adapters_location(self.settings, policy), version, checkpoint)
        if version not in self.run.updates:
            name = self.config.base_model_name
            update = policy_update(self.manifest, checkpoint, place, self.engine.policy, name)
            self.writer.write(topics.POLICIES, update, traceparent)
            self.run.updates[version] = update

    def _prune(self) -> None:
        promoted = [promotion.version for promotion, _ in self.run.promotions]

        def needed_versions(present: Collection[int]) -> set[int]:
            return versions_to_keep(present, self.version, self.config.max_staleness, promoted, self.run.protected)

        runs = self.lineage.branches(self.run.run_id)
        local = {
            (run, checkpoint.folder.name): checkpoint
            for run in runs
            for checkpoint in read_checkpoints(checkpoint_root(self.settings, run))
        }
        stored = {run: stored_steps(self.settings, run) for run in runs}
        steps = {(run, name): step for run, found in stored.items() for name, step in found.items()}
        steps |= {place: checkpoint.state.step for place, checkpoint in local.items()}
        versions = {(run, name): self.lineage.version(Node(run, step)) for (run, name), step in steps.items()}
        own = sorted((version for (run, _), version in versions.items() if run == self.run.run_id), reverse=True)
        newest = set(own[: self.config.keep_checkpoints])
        kept = newest | needed_versions(set(versions.values()))
        kept_here = newest if is_remote(self.settings) else kept
        remove_checkpoints(checkpoint for place, checkpoint in local.items() if versions[place] not in kept_here)
        remove_leftovers(checkpoint_root(self.settings, self.run.run_id))
        for run in runs:
            old = [name for (of, name), version in versions.items() if of == run and version not in kept]
            remove_stored(self.settings, run, [name for name in old if name in stored[run]])
        prune_adapters(adapters_location(self.settings, self.config.policy), self.config.keep_adapters, needed_versions)


def step_trace_name(run_id: str, step: int, attempt: int) -> str:
    """Returns the name of a step in traces."""
    return f"{run_id}/{step}/{attempt}"
