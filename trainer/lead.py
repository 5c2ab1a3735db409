"""What rank 0 does beside training: it recovers the run, plans, and publishes, in the order that makes each crash safe.

    plan -> step -> checkpoint -> verify -> StepResult -> adapter -> PolicyUpdate -> offset commit

A plan is on the log before its step. After a crash at any point the newest checkpoint is found, what should follow it
and is not on the log is written again, and a plan for the step after it is executed as it stands.
"""

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.codec import Codec
from schemas.records import BatchPlan, Promotion, RunManifest, StepResult
from tentalis import tracing
from tentalis.config import Settings
from tentalis.kafka import Follower, end_offsets, now_ms
from trainer.checkpoint import Checkpoint, CheckpointState, checkpoints, prune, save
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.fetch import forgotten_of
from trainer.manifest import manifest_of, start_positions
from trainer.metrics import TrainerMetrics
from trainer.model import adapter_sha256
from trainer.offers import Segment
from trainer.plan import PlanHead, Planner, next_attempt, plan_of
from trainer.publish import Ledger, policy_update, publish_adapter
from trainer.runlog import RunLog, decoded, read_run
from trainer.step import Outcome
from trainer.world import World

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0


class CannotResume(RuntimeError):
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


@dataclass(slots=True)
class Lead:
    """Rank 0. `checkpoint` is that of the last complete step."""

    settings: Settings
    config: TrainerConfig
    codec: Codec
    engine: Engine
    world: World
    run: RunLog
    ledger: Ledger
    manifest: RunManifest
    owner: str
    checkpoint: Checkpoint
    planner: Planner
    promotions: Follower
    metrics: TrainerMetrics
    _changed: bool = True
    _spoke: float = 0.0
    _waits_for: str = ""

    @classmethod
    def recover(
        cls,
        settings: Settings,
        config: TrainerConfig,
        codec: Codec,
        engine: Engine,
        world: World,
        model_folder: Path,
        metrics: TrainerMetrics,
    ) -> "Lead":
        """Takes the policy over, loads the newest checkpoint that the log vouches for into the engine, or makes the
        first one, and writes what is missing for it. Raises CannotResume, BadCheckpoint, ValueError (another adapter
        shape)."""
        ledger = Ledger(settings, codec, config.policy)
        # Only now: what a predecessor had in flight is committed or aborted.
        run = read_run(settings, codec, config.run_id, config.policy)
        initial = engine.policy.adapter_bytes()
        start = start_positions(config, run, settings)
        manifest = manifest_of(config, run, model_folder, adapter_sha256(initial), world.size, start)
        root = checkpoint_root(settings, config.run_id)
        checkpoint = resume_point(checkpoints(root), run, root)
        if manifest.digest not in run.manifests:
            ledger.write(topics.RUNS, manifest)
            run.manifests[manifest.digest] = manifest
        owner = uuid.uuid4().hex
        if checkpoint is None:
            state = _first_state(manifest, owner, start, adapter_sha256(initial))
            config_file = engine.policy.adapter_config()
            checkpoint = save(root, state, initial, config_file, engine.optimizer_state())
        else:
            engine.load(checkpoint.adapter(), checkpoint.optimizer())
            log.info("resumes run %s after step %d", config.run_id, checkpoint.state.step)
        consumed = {
            row.rollout_id: row.digest
            for step in range(1, checkpoint.state.step + 1)
            if (plan := run.latest_plan(step)) is not None
            for row in plan.rows
        }
        low_water = start | checkpoint.state.low_water
        lead = cls(
            settings,
            config,
            codec,
            engine,
            world,
            run,
            ledger,
            manifest,
            owner,
            checkpoint,
            Planner(config.batch_rollouts, config.max_staleness, consumed, low_water),
            Follower(settings, topics.POLICIES),
            metrics,
        )
        lead._announce({})
        metrics.recovered(config.policy, lead.step, manifest.first_version + lead.step)
        return lead

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.checkpoint.state.step

    @property
    def finished(self) -> bool:
        """Whether the run has all the steps that the configuration asks for."""
        return self.config.steps is not None and self.step >= self.config.steps

    def take(self, reports: list[Any]) -> None:
        """Offers from the ranks."""
        for report in reports:
            for segment in report["segments"]:
                self.planner.take(Segment.from_json(segment))
                self._changed = True
            self.metrics.read(report["rank"], report["lag"], report["dead"])
        if reports:
            self.metrics.pending(self.planner.pending)

    def next_plan(self) -> BatchPlan | None:
        """The plan of the next step, on the log when it is returned; None while there is none to be had."""
        self._follow_promotions()
        step = self.step + 1
        plan = self.run.latest_plan(step)
        plan = self._new_plan(step) if plan is None else self._found_plan(plan)
        if plan is not None:
            self.run.plans[step, plan.attempt] = plan
            self.planner.consume(
                ((row.rollout_id, row.digest) for row in plan.rows), {p.partition: p.offset for p in plan.low_water}
            )
            self._changed = True
            self.metrics.planned(plan, self.planner.pending)
        return plan

    def _found_plan(self, plan: BatchPlan) -> BatchPlan:
        """The plan that is on the log for the next step, or a new attempt of it."""
        forgotten = forgotten_of(self.settings, self.codec, plan.rows)
        if plan.manifest_digest == self.manifest.digest and not forgotten:
            log.info("executes the plan of step %d that is on the log", plan.step)
            return plan
        if forgotten:
            log.warning("%d rollouts of the plan of step %d were forgotten: new attempt", len(forgotten), plan.step)
        else:
            log.warning("the plan of step %d was made for another world or configuration: new attempt", plan.step)
        plan = next_attempt(plan, self._head(), now_ms(), forgotten)
        self.ledger.write(topics.BATCHES, plan)
        return plan

    def _new_plan(self, step: int) -> BatchPlan | None:
        served = max(0, (self.run.promoted or 0) - self.manifest.first_version)
        if step - served > max(1, self.config.max_staleness):
            self._heartbeat(
                "served", f"waits: step {self.step} is trained, the served version is that of step {served}"
            )
            return None
        version = self.manifest.first_version + self.step
        if not self._changed or not self.planner.has_batch(version):
            self._changed = False
            here = self.planner.pending
            self._heartbeat("rollouts", f"waits for rollouts: {here} of {self.config.batch_rollouts} are there")
            return None
        draft = self.planner.draft(version, end_offsets(self.settings, topics.ROLLOUTS))
        if draft is None:
            return None
        for key in draft.forged:
            log.error("forged: another record of rollout %s has another digest than the one that was trained", key)
        plan = plan_of(draft, self._head(), step, 1, now_ms())
        self.ledger.write(topics.BATCHES, plan)
        return plan

    def complete(self, plan: BatchPlan, outcome: Outcome, fetching: float) -> None:
        """The step is trained: checkpoint, result, adapter, announcement. Raises Fenced, BadCheckpoint,
        AdapterExists."""
        began = time.perf_counter()
        adapter = self.engine.policy.adapter_bytes()
        state = CheckpointState(
            run_id=plan.run_id,
            policy=plan.policy,
            step=plan.step,
            attempt=plan.attempt,
            plan_id=plan.plan_id,
            owner=plan.owner,
            manifest_digest=plan.manifest_digest,
            low_water={p.partition: p.offset for p in plan.low_water},
            adapter_sha256=adapter_sha256(adapter),
            optimizer_steps=self.engine.optimizer_state().steps,
            metrics=outcome.metrics,
            seconds=outcome.seconds | {"fetch": fetching},
        )
        root = checkpoint_root(self.settings, plan.run_id)
        config_file = self.engine.policy.adapter_config()
        self.checkpoint = save(root, state, adapter, config_file, self.engine.optimizer_state())
        self._announce({"checkpoint": time.perf_counter() - began})
        prune(root, self.config.keep_checkpoints, self.checkpoint)
        seconds = state.seconds | {"publish": time.perf_counter() - began}
        self.metrics.stepped(plan.policy, plan.step, self.manifest.first_version + plan.step, outcome.metrics, seconds)

    def _announce(self, seconds: Mapping[str, float]) -> None:
        """Writes of StepResult, adapter and PolicyUpdate what is not there."""
        checkpoint, state, policy = self.checkpoint, self.checkpoint.state, self.config.policy
        traceparent = tracing.derived(step_name(state.run_id, state.step, state.attempt)) if state.step else None
        version = self.manifest.first_version + state.step
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
            self.ledger.write(topics.BATCHES, result, traceparent)
            self.run.results[state.step, state.attempt] = result
        folder = publish_adapter(self.settings.home, policy, version, checkpoint)
        if version not in self.run.updates:
            name = self.config.base_model_name
            update = policy_update(self.manifest, checkpoint, folder, self.engine.policy, name)
            self.ledger.write(topics.POLICIES, update, traceparent)
            self.run.updates[version] = update

    def _head(self) -> PlanHead:
        return PlanHead(
            self.config.run_id,
            self.config.policy,
            self.manifest.digest,
            self.world.size,
            self.config.micro_batch_tokens,
            self.config.seed,
            self.owner,
        )

    def _follow_promotions(self) -> None:
        for stored in self.promotions.poll(0.0):
            record = decoded(stored, self.codec)
            if isinstance(record, Promotion) and record.policy == self.config.policy:
                self.run.promoted = record.version
                self.metrics.promoted(record.policy, record.version)

    def _heartbeat(self, reason: str, text: str) -> None:
        """Says why nothing happens: at once, and then now and again."""
        self.metrics.waits(reason)
        if reason != self._waits_for or time.monotonic() - self._spoke > HEARTBEAT_SECONDS:
            self._waits_for, self._spoke = reason, time.monotonic()
            log.info("%s", text)

    def close(self) -> None:
        """Leaves."""
        self.promotions.close()


def _first_state(manifest: RunManifest, owner: str, start: Mapping[int, int], sha256: str) -> CheckpointState:
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
        optimizer_steps=0,
        metrics={},
        seconds={},
    )


def step_name(run_id: str, step: int, attempt: int) -> str:
    """Of a step, in traces."""
    return f"{run_id}/{step}/{attempt}"


def checkpoint_root(settings: Settings, run_id: str) -> Path:
    """Where a run's checkpoints are."""
    return settings.home / "checkpoints" / run_id
