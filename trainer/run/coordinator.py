"""Rank 0's decisions between steps: is there another step, may it begin, and which rollouts does it train on.

    plan -> step -> commit (commit.py) -> offset commit

A plan is on the log before its step. The commit runs on a thread: the next step may be planned and computed meanwhile,
and begins its own commit after it. After a crash at any point the newest checkpoint is found (resume.py), and the plans
for the steps after it, two at most, are executed unchanged. If the newest checkpoints are lost, so are those of
completed steps (rebuild.py). A plan whose step is not finite gets a next attempt, without the rollouts that cause it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.records import BatchPlan
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Follower
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.lineage import Node
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from trainer.config.trainer_config import TrainerConfig
from trainer.config.training_hours import TrainingHours
from trainer.data.candidates import ReadSegment
from trainer.data.fetch import look_up_rollouts
from trainer.data.plan import BatchPlanner, next_attempt, plan_of, rewarded_samples
from trainer.data.positions import offsets_of
from trainer.run.backpressure import BackpressureReporter
from trainer.run.backpressure_gate import BackpressureGate
from trainer.run.commit import CommittedStep, commit_step
from trainer.run.commit_thread import CommitThread
from trainer.run.culprit_letters import write_culprits
from trainer.run.metrics import TrainerMetrics
from trainer.run.rebuild import RESTORE, CannotRebuild, check_rollouts, recorded_plan
from trainer.run.resume import consumed_plans, resume
from trainer.run.rollback import due_rollback
from trainer.run.rollouts_topic import take_topic
from trainer.run.run_log import decode_record
from trainer.run.state import RunState
from trainer.run.stop_condition import StopCondition
from trainer.step.engine import TrainingEngine
from trainer.step.step import StepOutput

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
# Interval between queries of the partitions' ends, if the trainer stops when it has caught up.
ENDS_SECONDS = 1.0
# Offers kept in memory while the trainer waits for a promotion or its hours; the rest stays on the log.
MAX_HELD_OFFERS = 100_000
PAUSE_REASONS = ("served", "window")


@dataclass(slots=True)
class Coordinator:
    """Rank 0's state and decisions between training steps. `recovered_step`: the last complete step at the start,
    with or without a checkpoint; `planned_step`: the last one then with a plan on the log."""

    state: RunState
    codec: Codec
    planner: BatchPlanner
    promotions: Follower
    metrics: TrainerMetrics
    training_hours: TrainingHours
    stop_condition: StopCondition
    recovered_step: int
    planned_step: int
    backpressure: BackpressureReporter
    commits: CommitThread[CommittedStep] = field(default_factory=CommitThread)
    reading_paused: bool = False
    offsets_anew: bool = False
    """The plans up to `planned_step` had the offsets of a topic that was lost or moved when the trainer began."""
    _planned_anew: set[int] = field(default_factory=set)
    """The steps that have a plan with the present offsets since."""
    _end_offsets: dict[int, int] = field(default_factory=dict)
    _ends_read_at: float = 0.0
    _offers_changed: bool = True
    _logged_at: float = 0.0
    _waiting_for: str = ""
    _topk_warned: bool = False
    _recorded_drops: tuple[int, int] = (0, 0)
    """The last step with a new attempt, and the number of its drops that the metrics have counted."""

    @classmethod
    def recover(
        cls,
        settings: Settings,
        config: TrainerConfig,
        codec: Codec,
        engine: TrainingEngine,
        world_size: int,
        model_folder: Path,
        metrics: TrainerMetrics,
        stop_condition: StopCondition,
    ) -> "Coordinator":
        """Takes over the policy and recovers the run's position. Raises the errors of `resume`."""
        state = resume(settings, config, codec, engine, world_size, model_folder)
        consumed_by = consumed_plans(state, codec)
        consumed = {row.rollout_id: row.digest for plan in consumed_by for row in plan.rows}
        low_water = offsets_of(state.manifest.start) | state.checkpoint.state.low_water
        position = take_topic(state, codec, low_water, len(consumed))
        planner = BatchPlanner(
            config.batch_rollouts,
            config.max_staleness,
            consumed,
            position.low_water,
            config.batch_tokens,
            cache(state.lineage.staleness),
            rewarded_samples(consumed_by),
        )
        state.run.drop_before(state.step)
        metrics.set_recovered(config.policy, state.step, state.version)
        return cls(
            state,
            codec,
            planner,
            Follower(settings, topics.POLICIES),
            metrics,
            TrainingHours.of(config.windows, config.time_zone),
            stop_condition,
            max(state.step, state.run.last_step),
            max((step for step, _ in state.run.plans), default=0),
            BackpressureReporter(
                BackpressureGate(config.policy, state.run.run_id, config.max_staleness), state.writer, metrics
            ),
            offsets_anew=position.anew,
        )

    @property
    def steps_done(self) -> int:
        """Steps trained since the recovery, without those that are trained again."""
        return max(0, self.state.step - self.recovered_step)

    @property
    def end_reason(self) -> str | None:
        """The reason why the trainer ends: the configured steps are done, or the stop condition holds; None to
        continue."""
        run_id, steps = self.state.run.run_id, self.state.config.steps
        if steps is not None and self.state.own_steps >= steps:
            return f"run {run_id} has completed its {steps} steps"
        if self.stop_condition.reached(self.steps_done):
            return f"the requested steps are done: run {run_id} is at step {self.state.step}"
        if self.stop_condition.caught_up and self._caught_up():
            return f"run {run_id} has caught up after {self.steps_done} steps: no full batch is left on the log"
        return None

    @property
    def rolled_back(self) -> bool:
        """True if a rollback to an earlier version was decided for this run."""
        self._follow_policy()
        return due_rollback(self.state.run, Node(self.state.run.run_id, self.state.step)) is not None

    @property
    def should_pause_reading(self) -> bool:
        """True if reading must pause: the trainer waits for something other than rollouts, and memory would only fill
        up."""
        return self._waiting_for in PAUSE_REASONS and self.planner.pending > MAX_HELD_OFFERS

    def add_reports(self, reports: list[Any]) -> None:
        """Adds the ranks' reports: offers and counts."""
        for report in reports:
            for segment in report["segments"]:
                self.planner.add_segment(ReadSegment.from_json(segment))
                self._offers_changed = True
            self.metrics.record_report(report["rank"], report["lag"], report["dead"], report["without_topk"])
            if report["without_topk"] and not self._topk_warned:
                self._topk_warned = True
                log.warning(
                    "rollouts have hints, but lack the most likely tokens that opd_kind: topk distils from: their "
                    "OPD part trains nothing. Make hinting ask the teacher for them: teacher.top in its file, or "
                    "--teacher-top"
                )
        if reports:
            self.metrics.set_pending(self.planner.pending)

    def update_backpressure(self) -> None:
        """Publishes backpressure if it changed: more rollouts would only be dropped as stale."""
        self.backpressure.update(self.planner, self.state.step, self.state.version, self.state.steps_ahead)

    def next_plan(self) -> BatchPlan | None:
        """Returns the plan of the next step, already on the log; None if there is none yet."""
        step = self.state.step + 1
        if step <= self.recovered_step:
            plan: BatchPlan | None = self._completed_plan(step)
        elif not self._may_begin():
            return None
        else:
            plan = self.state.run.latest_plan(step)
            if plan is None or self._has_old_offsets(step):
                plan = self._new_plan(step, 1 if plan is None else plan.attempt + 1)
                if plan is not None:
                    self._planned_anew.add(step)
            else:
                plan = self._resume_plan(plan)
        if plan is not None:
            self.state.run.plans[step, plan.attempt] = plan
            self.planner.consume(plan.rows, offsets_of(plan.low_water))
            self._offers_changed = True
            recorded_step, recorded = self._recorded_drops
            drops = plan.drops[recorded:] if recorded_step == step else plan.drops
            self.metrics.record_plan(drops, self.planner.pending)
        return plan

    def commit_step(
        self, plan: BatchPlan, output: StepOutput, fetch_seconds: float, check: Callable[[], None]
    ) -> list[dict[int, int]]:
        """Waits until the step before is committed, then begins the commit of the step just trained. Returns the low
        water of the steps that were committed meanwhile. A step that was trained again is committed at once: nothing
        may be written before its adapter is the recorded one. Raises the errors of `commit_step`, and those of
        `check`, which it calls while it waits."""
        started_at = time.perf_counter()
        committed = self.wait_for_commit(check)
        seconds = {"fetch": fetch_seconds, "commit_wait": time.perf_counter() - started_at}
        # A version that was pinned or decided on while the step was computed must not be pruned with it.
        self._follow_policy()
        state = self.state
        self.commits.begin(partial(commit_step, state.settings, state.writer, state.copy_step(plan, output, seconds)))
        return committed + (self.wait_for_commit(check) if plan.step <= self.recovered_step else [])

    def take_commit(self) -> list[dict[int, int]]:
        """Returns the low water of the step whose commit has ended since the last call, if there is one. Raises the
        error of that commit."""
        return self._committed(self.commits.take())

    def wait_for_commit(self, check: Callable[[], None]) -> list[dict[int, int]]:
        """Waits until every trained step is committed; returns and raises as `commit_step`."""
        return self._committed(self.commits.wait(check))

    def _committed(self, committed: CommittedStep | None) -> list[dict[int, int]]:
        if committed is None:
            return []
        plan, version = committed.plan, self.state.manifest.first_version + committed.plan.step
        self.state.apply_commit(committed)
        self.state.run.drop_before(plan.step)
        if plan.step <= self.recovered_step:
            log.info("step %d was trained again from its plan, to the recorded adapter", plan.step)
            self.metrics.set_position(plan.policy, plan.step, version)
        else:
            self.backpressure.gate.set_step_duration(sum(committed.seconds.values()))
            self.metrics.record_step(plan.policy, plan.step, version, committed.metrics, committed.seconds)
        return [committed.checkpoint.state.low_water]

    def drop_culprits(self, plan: BatchPlan, culprits: Mapping[str, str]) -> None:
        """Writes the next attempt of a plan whose step is not finite, without the culprits (key -> reason), which get a
        dead letter each. The letters come first, so that a crash loses none: the plan's successor is then missing, and
        its step finds the same culprits. Raises CannotRebuild for a step that the log has a result for."""
        state = self.state
        if plan.step <= self.recovered_step:
            raise CannotRebuild(
                f"step {plan.step} of run {plan.run_id} was trained again from its plan and is not finite, but the log "
                f"has an adapter for it. This machine computes other bytes than the one that trained it. {RESTORE}"
            )
        write_culprits(state.settings, self.codec, plan, culprits)
        present = look_up_rollouts(state.settings, self.codec, plan.rows)
        attempt = state.write_plan(next_attempt(plan, state.plan_context, now_ms(), present, culprits))
        state.run.plans[plan.step, attempt.attempt] = attempt
        self.planner.release(culprits)
        self._recorded_drops = plan.step, len(plan.drops)

    def _has_old_offsets(self, step: int) -> bool:
        return self.offsets_anew and step <= self.planned_step and step not in self._planned_anew

    def close(self) -> None:
        """Releases backpressure and stops following promotions, after the last commit."""
        self.backpressure.release()
        self.promotions.close()

    def _may_begin(self) -> bool:
        """True if a step may begin now, apart from the rollouts available."""
        self._follow_policy()
        state = self.state
        if state.steps_ahead >= max(1, state.config.max_staleness):
            text = f"waiting: step {state.step} is trained, {state.steps_ahead} steps ahead of the served version"
            self._log_wait(
                "served", lambda: text if state.run.promoted_version is not None else f"{text}: none is served"
            )
            return False
        now = datetime.now(UTC)
        if not self.stop_condition.ignores_training_hours and not self.training_hours.open_at(now):
            self._log_wait(
                "window", lambda: f"waiting for its training hours, until {self.training_hours.next_opening(now)}"
            )
            return False
        if self._waiting_for in PAUSE_REASONS:
            self._waiting_for = ""
        return True

    def _completed_plan(self, step: int) -> BatchPlan:
        """Returns the plan of a completed step whose checkpoint is lost. Raises CannotRebuild."""
        plan = recorded_plan(self.state.run, step, self.state.manifest.digest)
        check_rollouts(self.state.settings, self.codec, plan)
        if self.offsets_anew:
            raise CannotRebuild(
                f"step {step} of run {plan.run_id} has no usable checkpoint, and its plan has the offsets of the "
                f"rollouts topic before that was moved to more partitions. {RESTORE}"
            )
        return plan

    def _resume_plan(self, plan: BatchPlan) -> BatchPlan:
        """Returns the plan that is on the log for the next step, or a new attempt of it."""
        state = self.state
        present = look_up_rollouts(state.settings, self.codec, plan.rows)
        forgotten = sum(rollout.forgotten for rollout in present.values())
        if plan.manifest_digest == state.manifest.digest and not forgotten:
            log.info("executing the plan of step %d that is on the log", plan.step)
            return plan
        if forgotten:
            log.warning("%d rollouts of the plan of step %d were forgotten: new attempt", forgotten, plan.step)
        else:
            log.warning("the plan of step %d was made for another world or configuration: new attempt", plan.step)
        return state.write_plan(next_attempt(plan, state.plan_context, now_ms(), present))

    def _new_plan(self, step: int, attempt: int) -> BatchPlan | None:
        state = self.state
        if not self._offers_changed or not self.planner.has_batch(state.version):
            self._offers_changed = False
            self._log_wait("rollouts", self._shortage_text)
            return None
        draft = self.planner.next_draft(state.version, end_offsets(state.settings, topics.ROLLOUTS))
        if draft is None:
            return None
        for key in draft.forged:
            log.error("forged: another record of rollout %s has a different digest from the trained one", key)
        return state.write_plan(plan_of(draft, state.plan_context, step, attempt, now_ms()))

    def _shortage_text(self) -> str:
        available, skipped = self.planner.count_usable(self.state.version)
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        text = f"waiting for rollouts: {available} of {self.state.config.batch_rollouts} are available"
        return f"{text}, unusable: {reasons}" if reasons else text

    def _caught_up(self) -> bool:
        """True if all records up to the last queried ends of the log were read, but are too few for a batch."""
        state = self.state
        if not self._end_offsets or (not self._offers_changed and time.monotonic() - self._ends_read_at > ENDS_SECONDS):
            self._end_offsets, self._ends_read_at = end_offsets(state.settings, topics.ROLLOUTS), time.monotonic()
        step = state.step + 1
        is_planned = state.run.latest_plan(step) is not None and not self._has_old_offsets(step)
        return (
            not is_planned and self.planner.caught_up(self._end_offsets) and not self.planner.has_batch(state.version)
        )

    def _follow_policy(self) -> None:
        run = self.state.run
        for stored in self.promotions.poll(0.0):
            record = decode_record(stored, self.codec)
            if record is not None:
                run.add_record(record, stored.offset)
        if run.promoted_version is not None:
            self.metrics.set_promoted(run.policy, run.promoted_version)

    def _log_wait(self, reason: str, text: Callable[[], str]) -> None:
        """Logs the reason for waiting: immediately when it changes, then every HEARTBEAT_SECONDS."""
        self.metrics.set_waiting(reason)
        if reason != self._waiting_for or time.monotonic() - self._logged_at > HEARTBEAT_SECONDS:
            self._waiting_for, self._logged_at = reason, time.monotonic()
            log.info("%s", text())
