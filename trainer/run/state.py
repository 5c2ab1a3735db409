"""The position of a run: its last trained step, whose commit (commit.py) may be under way, and its newest
checkpoint."""

import time
from dataclasses import dataclass, field

from schemas import topics
from schemas.records import BatchPlan, RunManifest
from tentalis.policies.lineage import Lineage, Node
from tentalis.service.settings import Settings
from trainer.advantages.baseline import RunningBaseline
from trainer.config.trainer_config import TrainerConfig
from trainer.data.plan import PlanContext
from trainer.run.checkpoint import Checkpoint
from trainer.run.commit import Announced, Announcement, CommittedStep, TrainedStep, announce
from trainer.run.prune import Retention
from trainer.run.publish import TransactionalWriter, canary_of
from trainer.run.run_log import RunLog
from trainer.step.engine import TrainingEngine
from trainer.step.step import StepOutput


@dataclass(slots=True)
class RunState:
    """A run at its last trained step, whose adapter the engine holds. `checkpoint`: the newest one, of that step or of
    the step before, if the commit is under way. `config` has the id of the run, which after a rollback differs from the
    id in the file."""

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
    step: int = field(init=False)
    """The last trained step."""
    _baseline: RunningBaseline = field(init=False)
    """Of single answers, after that step."""

    def __post_init__(self) -> None:
        self.step = self.checkpoint.state.step
        self._baseline = RunningBaseline.of_metrics(self.checkpoint.state.metrics)

    @property
    def version(self) -> int:
        """The version of the last trained step."""
        return self.manifest.first_version + self.step

    @property
    def own_steps(self) -> int:
        """Steps of the configuration that the weights include: those of another run, from whose version a rollback let
        this one begin, do not count."""
        return self.lineage.own_steps(self.run.run_id, Node(self.run.run_id, self.step))

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
            None if config.loss.baseline_decay is None else self._baseline.mean,
        )

    def write_plan(self, plan: BatchPlan) -> BatchPlan:
        """Writes a plan to the log. Raises TrainerFenced."""
        self.writer.write(topics.BATCHES, plan)
        return plan

    def copy_step(self, plan: BatchPlan, output: StepOutput, more_seconds: dict[str, float]) -> TrainedStep:
        """Returns a copy of the step just trained, for its commit, and makes it the last trained step. `more_seconds`:
        phases besides those in `output`."""
        copied_at = time.perf_counter()
        self.step = plan.step
        # Without a decay all steps count alike, and no step uses it.
        decay = self.config.loss.baseline_decay
        self._baseline = self._baseline.after(output.metrics, 1.0 if decay is None else decay)
        policy = self.engine.policy
        return TrainedStep(
            plan=plan,
            metrics=output.metrics | self._baseline.metrics(),
            seconds=output.seconds | more_seconds,
            weights=policy.weights_copy(),
            version_files=policy.files(),
            optimizer=self.engine.optimizer_state(),
            rollouts_topic_id=self.rollouts_topic_id,
            control_topic_ids=self.control_topic_ids,
            announcement=self._announcement(plan.attempt),
            retention=Retention(
                self.config,
                self.lineage,
                self.version,
                tuple(promotion.version for promotion, _ in self.run.promotions),
                frozenset(self.run.protected),
                {version: update.sha256 for version, update in self.run.updates.items()},
            ),
            copied_at=copied_at,
        )

    def apply_commit(self, committed: CommittedStep) -> None:
        """Takes over the checkpoint and the records of a committed step."""
        self.checkpoint = committed.checkpoint
        self._apply_records(committed.announced)

    def announce_checkpoint(self) -> None:
        """Writes the records that are missing for the newest checkpoint, whose adapter the engine holds. Raises the
        errors of `announce`."""
        announcement = self._announcement(self.checkpoint.state.attempt)
        self._apply_records(announce(self.settings, self.writer, self.checkpoint, announcement, {}))

    def _announcement(self, attempt: int) -> Announcement:
        return Announcement(
            self.manifest,
            self.config.base_model_name,
            self.engine.policy.rank,
            self.run.results.get((self.step, attempt)),
            None if self.version in self.run.updates else canary_of(self.engine.policy),
        )

    def _apply_records(self, announced: Announced) -> None:
        if (result := announced.result) is not None:
            self.run.results[result.step, result.attempt] = result
        if announced.update is not None:
            self.run.updates[announced.update.version] = announced.update
