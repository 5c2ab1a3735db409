"""What rank 0 does beside training: it recovers the run, plans, and publishes, in the order that makes each crash safe.

    plan -> step -> checkpoint -> verify -> StepResult -> adapter -> PolicyUpdate -> offset commit

A plan is on the log before its step. After a crash at any point the newest checkpoint is found, what should follow it
and is not on the log is written again, and a plan for the step after it is executed as it stands.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.codec import Codec
from schemas.records import BatchPlan, RunManifest, StepResult
from tentalis import tracing
from tentalis.config import Settings
from tentalis.kafka import Follower, end_offsets, now_ms
from tentalis.lineage import Lineage, Node
from trainer.branch import branched, checkpoint_of, current_run, due_rollback, parent_of, start_of_branch
from trainer.checkpoint import Checkpoint, CheckpointState, checkpoint_root, checkpoints, prune, save, sweep
from trainer.config import TrainerConfig
from trainer.engine import Engine, OptimizerState
from trainer.fetch import forgotten_of
from trainer.goal import Goal
from trainer.manifest import manifest_of, start_positions
from trainer.metrics import TrainerMetrics
from trainer.model import adapter_sha256
from trainer.offers import Segment
from trainer.plan import PlanHead, Planner, next_attempt, plan_of
from trainer.pressure import Valve
from trainer.publish import Ledger, policy_update, prune_adapters, publish_adapter
from trainer.retention import needed
from trainer.runlog import RunLog, decoded, trained_by
from trainer.step import Outcome
from trainer.windows import Windows
from trainer.world import World

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
# How often back-pressure and, with a goal, the ends of the partitions are looked at.
PRESS_SECONDS, LOOK_SECONDS = 1.0, 1.0
# Up to so many offers, what waits is counted whenever it changed.
QUICK_OFFERS = 10_000
# Offers that may lie in memory while the trainer waits for a decision or its hours; the rest stays on the log.
HELD_OFFERS = 100_000
HELD_REASONS = ("served", "window")
NO_MOMENTS = OptimizerState({}, 0)


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
    lineage: Lineage
    windows: Windows
    goal: Goal
    began: int
    valve: Valve
    held: bool = False
    _ends: dict[int, int] = field(default_factory=dict)
    _looked: float = 0.0
    _changed: bool = True
    _spoke: float = 0.0
    _pressed: float = 0.0
    _seen: tuple[int, int, int] = (-1, 0, 0)
    _waits_for: str = ""
    _told: bool = False

    @classmethod
    def recover(
        cls,
        settings: Settings,
        config: TrainerConfig,
        codec: Codec,
        engine: Engine,
        initial: bytes,
        world: World,
        model_folder: Path,
        metrics: TrainerMetrics,
        goal: Goal,
    ) -> "Lead":
        """Takes the policy over, loads the newest checkpoint that the log vouches for into the engine, or makes the
        first one, and writes what is missing for it. After a rollback that is a new run. `initial` is the adapter that
        the configuration's seed gives. Raises CannotResume, CannotBranch, BadCheckpoint, ValueError (another adapter
        shape)."""
        ledger = Ledger(settings, codec, config.policy)
        # Only now: what a predecessor had in flight is committed or aborted.
        run = current_run(settings, codec, config)
        if run.first is not None and run.first.policy != config.policy:
            raise CannotResume(
                f"run {config.run_id} trains {run.first.policy}, not {config.policy}: a policy needs runs of its own"
            )
        parent, start = parent_of(run), start_positions(config, run, settings)
        target = due_rollback(run)
        if target is not None:
            parent, start = Node(target.run_id, target.step), start_of_branch(run)
            run = branched(run, config.run_id)
            log.warning(
                "rolled back to %s: run %s goes on from step %d of run %s", target.name, run.run_id, *parent[::-1]
            )
        config = config.model_copy(update={"run_id": run.run_id})
        root = checkpoint_root(settings, config.run_id)
        checkpoint = resume_point(checkpoints(root), run, root)
        origin = checkpoint_of(settings, run, parent) if parent is not None and checkpoint is None else None
        if origin is not None:
            sha256 = origin.state.adapter_sha256
        else:
            sha256 = adapter_sha256(initial) if run.first is None else run.first.initial_adapter_sha256
        manifest = manifest_of(config, run, model_folder, sha256, world.size, start, parent)
        if manifest.digest not in run.manifests:
            ledger.write(topics.RUNS, manifest)
            run.manifests[manifest.digest] = manifest
            run.relatives = (*run.relatives, manifest)
        owner = uuid.uuid4().hex
        if checkpoint is None:
            weights, moments = (initial, NO_MOMENTS) if origin is None else (origin.adapter(), origin.optimizer())
            state = _first_state(manifest, owner, start, sha256, moments.steps)
            checkpoint = save(root, state, weights, engine.policy.adapter_config(), moments)
        engine.load(checkpoint.adapter(), checkpoint.optimizer())
        log.info("run %s goes on after step %d", config.run_id, checkpoint.state.step)
        lineage = run.lineage
        relatives = set(lineage.family(config.run_id)) - {config.run_id}
        consumed = trained_by(settings, codec, relatives) if relatives else {}
        consumed |= {
            row.rollout_id: row.digest
            for step in range(1, checkpoint.state.step + 1)
            if (plan := run.latest_plan(step)) is not None
            for row in plan.rows
        }
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
            Planner(
                config.batch_rollouts,
                config.max_staleness,
                consumed,
                start | checkpoint.state.low_water,
                config.batch_tokens,
                cache(lineage.staleness),
            ),
            Follower(settings, topics.POLICIES),
            metrics,
            lineage,
            Windows.of(config.windows, config.time_zone),
            goal,
            checkpoint.state.step,
            Valve(config.policy, config.run_id, config.max_staleness),
        )
        lead._announce({})
        metrics.recovered(config.policy, lead.step, lead.version)
        return lead

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.checkpoint.state.step

    @property
    def done(self) -> int:
        """Steps since it was recovered."""
        return self.step - self.began

    @property
    def version(self) -> int:
        """The version of the last complete step."""
        return self.manifest.first_version + self.step

    @property
    def depth(self) -> int:
        """Steps from the initial adapter of the family's first run."""
        return self.lineage.depth(Node(self.run.run_id, self.step))

    @property
    def ahead(self) -> int:
        """Steps beyond the version that is served; all there are while none is."""
        served = None if self.run.promoted is None else self.lineage.node(self.run.promoted)
        head = Node(self.run.run_id, self.step)
        found = None if served is None else self.lineage.distance(head, served)
        return self.step if found is None else found

    @property
    def finished(self) -> str | None:
        """Why there is nothing more to do: all the steps that the configuration or whoever started it asked for."""
        if self.config.steps is not None and self.depth >= self.config.steps:
            return f"run {self.run.run_id} has its {self.config.steps} steps"
        if self.goal.reached(self.done):
            return f"the {self.done} steps of run {self.run.run_id} that were asked for are done"
        if self.goal.caught_up and self._caught_up():
            return f"run {self.run.run_id} has caught up after {self.done} steps: no full batch is left on the log"
        return None

    @property
    def rolled_back(self) -> bool:
        """Whether somebody decided that the run goes on from an earlier version."""
        self._follow_policy()
        return due_rollback(self.run) is not None

    def take(self, reports: list[Any]) -> None:
        """Offers from the ranks."""
        for report in reports:
            for segment in report["segments"]:
                self.planner.take(Segment.from_json(segment))
                self._changed = True
            self.metrics.read(report["rank"], report["lag"], report["dead"], report["without_topk"])
            if report["without_topk"] and not self._told:
                self._told = True
                log.warning(
                    "rollouts come with hints, but without the likeliest tokens that opd_kind: topk distils from: "
                    "their OPD part trains nothing. Ask the teacher for them: teacher.top in hinting's file, or "
                    "--teacher-top"
                )
        if reports:
            self.metrics.pending(self.planner.pending)

    def next_plan(self) -> BatchPlan | None:
        """The plan of the next step, on the log when it is returned; None while there is none to be had."""
        if not self._may_begin():
            return None
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

    def _may_begin(self) -> bool:
        """Whether a step may begin now, whatever there is to train on."""
        self._follow_policy()
        if self.ahead >= max(1, self.config.max_staleness):
            waits = f"waits: step {self.step} is trained, {self.ahead} steps beyond what is served"
            self._heartbeat("served", lambda: waits if self.run.promoted is not None else f"{waits}: nothing is")
            return False
        now = datetime.now(UTC)
        if not self.goal.by_hand and not self.windows.open_at(now):
            self._heartbeat("window", lambda: f"waits for its hours, until {self.windows.next_opening(now)}")
            return False
        if self._waits_for in HELD_REASONS:
            self._waits_for = ""
        return True

    def _new_plan(self, step: int) -> BatchPlan | None:
        if not self._changed or not self.planner.has_batch(self.version):
            self._changed = False
            here = self.planner.pending
            self._heartbeat("rollouts", lambda: f"waits for rollouts: {here} of {self.config.batch_rollouts} are there")
            return None
        draft = self.planner.draft(self.version, end_offsets(self.settings, topics.ROLLOUTS))
        if draft is None:
            return None
        for key in draft.forged:
            log.error("forged: another record of rollout %s has another digest than the one that was trained", key)
        plan = plan_of(draft, self._head(), step, 1, now_ms())
        self.ledger.write(topics.BATCHES, plan)
        return plan

    def _caught_up(self) -> bool:
        """Whether all that was on the log when it was last looked at was read, and makes no batch."""
        if not self._ends or (not self._changed and time.monotonic() - self._looked > LOOK_SECONDS):
            self._ends, self._looked = end_offsets(self.settings, topics.ROLLOUTS), time.monotonic()
        planned = self.run.latest_plan(self.step + 1) is not None
        return not planned and self.planner.caught_up(self._ends) and not self.planner.has_batch(self.version)

    def press(self) -> None:
        """Says, where it changed, whether more rollouts would only be thrown away."""
        now, seen = time.monotonic(), (self.step, self.ahead, self.planner.pending)
        # To count what waits takes a while where much does.
        if now - self._pressed < PRESS_SECONDS and (seen == self._seen or self.planner.pending > QUICK_OFFERS):
            return
        self._pressed, self._seen = now, seen
        self._say(self.planner.waiting(self.version), self.ahead)

    def release(self) -> None:
        """It ends, and nobody shall wait for it."""
        self._say(0, 0)

    def _say(self, waiting: int, ahead: int) -> None:
        said = self.valve.due(waiting, ahead, now_ms())
        if said is not None:
            self.ledger.write(topics.POLICIES, said)
            log.info("%s", f"no more rollouts: {said.reason}" if said.closed else "rollouts are welcome again")
        self.metrics.pressed(bool(self.valve.closed), waiting)

    @property
    def holds(self) -> bool:
        """Whether so much waits for something else than rollouts that reading on would only fill the memory."""
        return self._waits_for in HELD_REASONS and self.planner.pending > HELD_OFFERS

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
        self._prune()
        seconds = state.seconds | {"publish": time.perf_counter() - began}
        self.metrics.stepped(plan.policy, plan.step, self.version, outcome.metrics, seconds)

    def _prune(self) -> None:
        promoted = [promotion.version for promotion, _ in self.run.promotions]

        def keeps(present: Collection[int]) -> set[int]:
            return needed(present, self.version, self.config.max_staleness, promoted, self.run.pinned)

        found = {
            checkpoint.folder: (self.lineage.version(Node(run, checkpoint.state.step)), checkpoint)
            for run in self.lineage.family(self.run.run_id)
            for checkpoint in checkpoints(checkpoint_root(self.settings, run))
        }
        kept = keeps({version for version, _ in found.values()})
        newest = sorted((v for v, c in found.values() if c.state.run_id == self.run.run_id), reverse=True)
        kept.update(newest[: self.config.keep_checkpoints])
        prune(checkpoint for version, checkpoint in found.values() if version not in kept)
        sweep(checkpoint_root(self.settings, self.run.run_id))
        prune_adapters(self.settings.home, self.config.policy, self.config.keep_adapters, keeps)

    def _announce(self, seconds: Mapping[str, float]) -> None:
        """Writes of StepResult, adapter and PolicyUpdate what is not there."""
        checkpoint, state, policy = self.checkpoint, self.checkpoint.state, self.config.policy
        traceparent = tracing.derived(step_name(state.run_id, state.step, state.attempt)) if state.step else None
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
            self.config.loss.pair.weight > 0,
        )

    def _follow_policy(self) -> None:
        for stored in self.promotions.poll(0.0):
            record = decoded(stored, self.codec)
            if record is not None:
                self.run.take(record, stored.offset)
        if self.run.promoted is not None:
            self.metrics.promoted(self.config.policy, self.run.promoted)

    def _heartbeat(self, reason: str, text: Callable[[], str]) -> None:
        """Says why nothing happens: at once, and then now and again."""
        self.metrics.waits(reason)
        if reason != self._waits_for or time.monotonic() - self._spoke > HEARTBEAT_SECONDS:
            self._waits_for, self._spoke = reason, time.monotonic()
            log.info("%s", text())

    def close(self) -> None:
        """Leaves."""
        self.release()
        self.promotions.close()


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


def step_name(run_id: str, step: int, attempt: int) -> str:
    """Of a step, in traces."""
    return f"{run_id}/{step}/{attempt}"
