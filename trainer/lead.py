"""What rank 0 decides between steps: whether there is one more, whether it may begin, and what it is trained on.

    plan -> step -> commit (head.py) -> offset commit

A plan is on the log before its step. After a crash at any point the newest checkpoint is found (resume.py), and a plan
for the step after it is executed as it stands.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.codec import Codec
from schemas.records import BatchPlan
from tentalis.config import Settings
from tentalis.kafka import Follower, end_offsets, now_ms
from trainer.branch import due_rollback
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.fetch import looked_up
from trainer.goal import Goal
from trainer.head import Head
from trainer.metrics import TrainerMetrics
from trainer.offers import Segment
from trainer.plan import Planner, next_attempt, plan_of
from trainer.press import Press
from trainer.pressure import Valve
from trainer.resume import consumed, resume
from trainer.runlog import decoded
from trainer.step import Outcome
from trainer.windows import Windows

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
# How often, with a goal, the ends of the partitions are looked at.
LOOK_SECONDS = 1.0
# Offers that may lie in memory while the trainer waits for a decision or its hours; the rest stays on the log.
HELD_OFFERS = 100_000
HELD_REASONS = ("served", "window")


@dataclass(slots=True)
class Lead:
    """Rank 0 beside training."""

    head: Head
    codec: Codec
    planner: Planner
    promotions: Follower
    metrics: TrainerMetrics
    windows: Windows
    goal: Goal
    began: int
    pressure: Press
    held: bool = False
    _ends: dict[int, int] = field(default_factory=dict)
    _looked: float = 0.0
    _changed: bool = True
    _spoke: float = 0.0
    _waits_for: str = ""
    _told: bool = False

    @classmethod
    def recover(
        cls,
        settings: Settings,
        config: TrainerConfig,
        codec: Codec,
        engine: Engine,
        world_size: int,
        model_folder: Path,
        metrics: TrainerMetrics,
        goal: Goal,
    ) -> "Lead":
        """Takes the policy over and goes on from where the run is. Raises as `resume` does."""
        head = resume(settings, config, codec, engine, world_size, model_folder)
        start = {position.partition: position.offset for position in head.manifest.start}
        planner = Planner(
            config.batch_rollouts,
            config.max_staleness,
            consumed(head, codec),
            start | head.checkpoint.state.low_water,
            config.batch_tokens,
            cache(head.lineage.staleness),
        )
        head.run.let_go(head.step)
        metrics.recovered(config.policy, head.step, head.version)
        return cls(
            head,
            codec,
            planner,
            Follower(settings, topics.POLICIES),
            metrics,
            Windows.of(config.windows, config.time_zone),
            goal,
            head.step,
            Press(Valve(config.policy, head.run.run_id, config.max_staleness), head.ledger, metrics),
        )

    @property
    def done(self) -> int:
        """Steps since it was recovered."""
        return self.head.step - self.began

    @property
    def finished(self) -> str | None:
        """Why there is nothing more to do: all the steps that the configuration or whoever started it asked for."""
        run_id, steps = self.head.run.run_id, self.head.config.steps
        if steps is not None and self.head.depth >= steps:
            return f"run {run_id} has its {steps} steps"
        if self.goal.reached(self.done):
            return f"the steps that were asked for are done: run {run_id} is at step {self.head.step}"
        if self.goal.caught_up and self._caught_up():
            return f"run {run_id} has caught up after {self.done} steps: no full batch is left on the log"
        return None

    @property
    def rolled_back(self) -> bool:
        """Whether somebody decided that the run goes on from an earlier version."""
        self._follow_policy()
        return due_rollback(self.head.run) is not None

    @property
    def holds(self) -> bool:
        """Whether so much waits for something else than rollouts that reading on would only fill the memory."""
        return self._waits_for in HELD_REASONS and self.planner.pending > HELD_OFFERS

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

    def press(self) -> None:
        """Says, where it changed, whether more rollouts would only be thrown away."""
        self.pressure.look(self.planner, self.head.step, self.head.version, self.head.ahead)

    def next_plan(self) -> BatchPlan | None:
        """The plan of the next step, on the log when it is returned; None while there is none to be had."""
        if not self._may_begin():
            return None
        step = self.head.step + 1
        plan = self.head.run.latest_plan(step)
        plan = self._new_plan(step) if plan is None else self._found_plan(plan)
        if plan is not None:
            self.head.run.plans[step, plan.attempt] = plan
            self.planner.consume(
                ((row.rollout_id, row.digest) for row in plan.rows), {p.partition: p.offset for p in plan.low_water}
            )
            self._changed = True
            self.metrics.planned(plan, self.planner.pending)
        return plan

    def complete(self, plan: BatchPlan, outcome: Outcome, fetching: float) -> None:
        """The step is trained. Raises as `Head.commit` does."""
        seconds = self.head.commit(plan, outcome, fetching)
        self.head.run.let_go(plan.step)
        self.pressure.valve.stepped(sum(seconds.values()))
        self.metrics.stepped(plan.policy, plan.step, self.head.version, outcome.metrics, seconds)

    def close(self) -> None:
        """Leaves."""
        self.pressure.release()
        self.promotions.close()

    def _may_begin(self) -> bool:
        """Whether a step may begin now, whatever there is to train on."""
        self._follow_policy()
        head = self.head
        if head.ahead >= max(1, head.config.max_staleness):
            waits = f"waits: step {head.step} is trained, {head.ahead} steps beyond what is served"
            self._heartbeat("served", lambda: waits if head.run.promoted is not None else f"{waits}: nothing is")
            return False
        now = datetime.now(UTC)
        if not self.goal.by_hand and not self.windows.open_at(now):
            self._heartbeat("window", lambda: f"waits for its hours, until {self.windows.next_opening(now)}")
            return False
        if self._waits_for in HELD_REASONS:
            self._waits_for = ""
        return True

    def _found_plan(self, plan: BatchPlan) -> BatchPlan:
        """The plan that is on the log for the next step, or a new attempt of it."""
        head = self.head
        lying = looked_up(head.settings, self.codec, plan.rows)
        forgotten = sum(rollout.forgotten for rollout in lying.values())
        if plan.manifest_digest == head.manifest.digest and not forgotten:
            log.info("executes the plan of step %d that is on the log", plan.step)
            return plan
        if forgotten:
            log.warning("%d rollouts of the plan of step %d were forgotten: new attempt", forgotten, plan.step)
        else:
            log.warning("the plan of step %d was made for another world or configuration: new attempt", plan.step)
        return head.write_plan(next_attempt(plan, head.of_plans, now_ms(), lying))

    def _new_plan(self, step: int) -> BatchPlan | None:
        head = self.head
        if not self._changed or not self.planner.has_batch(head.version):
            self._changed = False
            self._heartbeat("rollouts", self._shortage)
            return None
        draft = self.planner.draft(head.version, end_offsets(head.settings, topics.ROLLOUTS))
        if draft is None:
            return None
        for key in draft.forged:
            log.error("forged: another record of rollout %s has another digest than the one that was trained", key)
        return head.write_plan(plan_of(draft, head.of_plans, step, 1, now_ms()))

    def _shortage(self) -> str:
        here, passed_over = self.planner.usable(self.head.version)
        others = ", ".join(f"{count} {reason}" for reason, count in passed_over.items())
        said = f"waits for rollouts: {here} of {self.head.config.batch_rollouts} are there"
        return f"{said}, not to be used are {others}" if others else said

    def _caught_up(self) -> bool:
        """Whether all that was on the log when it was last looked at was read, and makes no batch."""
        head = self.head
        if not self._ends or (not self._changed and time.monotonic() - self._looked > LOOK_SECONDS):
            self._ends, self._looked = end_offsets(head.settings, topics.ROLLOUTS), time.monotonic()
        planned = head.run.latest_plan(head.step + 1) is not None
        return not planned and self.planner.caught_up(self._ends) and not self.planner.has_batch(head.version)

    def _follow_policy(self) -> None:
        run = self.head.run
        for stored in self.promotions.poll(0.0):
            record = decoded(stored, self.codec)
            if record is not None:
                run.take(record, stored.offset)
        if run.promoted is not None:
            self.metrics.promoted(run.policy, run.promoted)

    def _heartbeat(self, reason: str, text: Callable[[], str]) -> None:
        """Says why nothing happens: at once, and then now and again."""
        self.metrics.waits(reason)
        if reason != self._waits_for or time.monotonic() - self._spoke > HEARTBEAT_SECONDS:
            self._waits_for, self._spoke = reason, time.monotonic()
            log.info("%s", text())
