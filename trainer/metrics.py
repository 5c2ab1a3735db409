"""What the trainer exports: written by rank 0 as it plans and steps."""

import time
from collections.abc import Mapping

from schemas.records import BatchPlan
from tentalis import metrics
from tentalis.metrics import Exporter
from trainer.composition import AGES, JOINED
from trainer.tracking import Trackers

WAITS = ("rollouts", "served", "window")
PARTS = ("rl", "opd")
LOSSES = (*PARTS, "kl", "pair")


class TrainerMetrics:
    """The metrics, and whether the trainer is ready. Written on the thread that trains, read on the one that serves."""

    def __init__(self) -> None:
        self.exporter = exporter = Exporter("trainer")
        self._ready = False
        self._dead: dict[int, int] = {}
        self._untaught: dict[int, int] = {}
        self._steps = exporter.counter(metrics.TRAINER_STEPS)
        self._step = exporter.gauge(metrics.TRAINER_STEP)
        self._version = exporter.gauge(metrics.TRAINER_VERSION)
        self._promoted = exporter.gauge(metrics.TRAINER_PROMOTED)
        self._step_seconds = exporter.histogram(metrics.TRAINER_STEP_SECONDS)
        self._phase_seconds = exporter.counter(metrics.TRAINER_PHASE_SECONDS)
        self._tokens = exporter.counter(metrics.TRAINER_TOKENS)
        self._speed = exporter.gauge(metrics.TRAINER_SPEED)
        self._rollouts = exporter.counter(metrics.TRAINER_ROLLOUTS)
        self._by_part = {
            "loss": exporter.gauge(metrics.TRAINER_LOSS),
            "clip_fraction": exporter.gauge(metrics.TRAINER_CLIPPED),
            "advantage_abs": exporter.gauge(metrics.TRAINER_ADVANTAGE),
        }
        self._of_step = {
            "reward_mean": exporter.gauge(metrics.TRAINER_REWARD),
            "reward_std": exporter.gauge(metrics.TRAINER_REWARD_STD),
            "hint_acceptance": exporter.gauge(metrics.TRAINER_HINTS),
            "ratio_mean": exporter.gauge(metrics.TRAINER_RATIO),
            "effective_sample_size": exporter.gauge(metrics.TRAINER_ESS),
            "staleness_mean": exporter.gauge(metrics.TRAINER_STALENESS),
            "mismatch_kl": exporter.gauge(metrics.TRAINER_KL),
            "entropy": exporter.gauge(metrics.TRAINER_ENTROPY),
            "grad_norm": exporter.gauge(metrics.TRAINER_GRADIENT),
            "learning_rate": exporter.gauge(metrics.TRAINER_RATE),
        }
        self._ages = exporter.counter(metrics.TRAINER_AGES)
        self._joins = exporter.counter(metrics.TRAINER_JOINS)
        self._mfu = exporter.gauge(metrics.TRAINER_MFU)
        self._peak = 0.0
        self._trackers: Trackers | None = None
        self._pending = exporter.gauge(metrics.TRAINER_PENDING)
        self._drops = exporter.counter(metrics.TRAINER_DROPS)
        self._lag = exporter.gauge(metrics.TRAINER_LAG)
        self._dead_letters = exporter.counter(metrics.TRAINER_DEAD)
        self._without_topk = exporter.counter(metrics.TRAINER_WITHOUT_TOPK)
        self._waiting = exporter.gauge(metrics.TRAINER_WAITING)
        self._pressure = exporter.gauge(metrics.TRAINER_PRESSURE)
        self._batches = exporter.gauge(metrics.TRAINER_BATCHES)
        self._turn = exporter.gauge(metrics.TRAINER_TURN)
        self.waits("")

    def not_ready(self) -> str | None:
        """Why it would not train now, None once the run is recovered."""
        return None if self._ready else "the model is loaded and the run recovered from the log first"

    def track(self, trackers: Trackers, peak: float) -> None:
        """From now on steps go to these trackers, and to no others. peak: FLOP/s of all ranks together, for MFU."""
        self.close()
        self._trackers, self._peak = trackers, peak

    def close(self) -> None:
        """Nothing more goes to the trackers."""
        if self._trackers is not None:
            self._trackers.close()

    def recovered(self, policy: str, step: int, version: int) -> None:
        """The run is where its log and checkpoints say, and goes on; its ranks count from 0, after a rollback too."""
        self._dead.clear()
        self._untaught.clear()
        self._step.set(step)
        self._version.labels(policy).set(version)
        self._ready = True

    def turned(self) -> None:
        """The loop came round."""
        self._turn.set(time.time())

    def read(self, rank: int, lag: Mapping[str, int], dead: int, without_topk: int = 0) -> None:
        """What a rank says of its partitions: records not read, and since it began its dead letters, and the rollouts
        that came without the likeliest tokens that the loss needs."""
        for partition, behind in lag.items():
            self._lag.labels(partition).set(behind)
        self._dead_letters.inc(dead - self._dead.get(rank, 0))
        self._dead[rank] = dead
        self._without_topk.inc(without_topk - self._untaught.get(rank, 0))
        self._untaught[rank] = without_topk

    def pending(self, count: int) -> None:
        """Offers that no plan has considered."""
        self._pending.set(count)

    def planned(self, plan: BatchPlan, pending: int) -> None:
        """A plan is on the log and is executed now."""
        for drop in plan.drops:
            self._drops.labels(drop.reason).inc(drop.count)
        self.pending(pending)
        self.waits("")

    def stepped(
        self, policy: str, step: int, version: int, outcome: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        """A step is complete: its metrics and its phases, as its StepResult has them."""
        self._steps.inc()
        self._step.set(step)
        self._version.labels(policy).set(version)
        total = sum(seconds.values())
        self._step_seconds.observe(total)
        for phase, spent in seconds.items():
            self._phase_seconds.labels(phase).inc(spent)
        self._tokens.inc(outcome["tokens"])
        self._speed.set(outcome["tokens"] / total)
        self._rollouts.labels("trained").inc(outcome["trained_rollouts"])
        self._rollouts.labels("idle").inc(outcome["rollouts"] - outcome["trained_rollouts"])
        for name, gauge in self._by_part.items():
            for part in LOSSES if name == "loss" else PARTS:
                gauge.labels(part).set(outcome[f"{part}_{name}"])
        for name, gauge in self._of_step.items():
            gauge.set(outcome[name])
        for age in AGES:
            self._ages.labels(age).inc(outcome[f"staleness_{age}"])
        for kind in JOINED:
            self._joins.labels(kind).inc(outcome[f"joined_{kind}"])
        computing = seconds["forward_backward"] * self._peak
        mfu = outcome["model_flops"] / computing if computing else 0.0
        self._mfu.set(mfu)
        if self._trackers is not None:
            self._trackers.step(step, {**outcome, "mfu": mfu}, seconds)

    def promoted(self, policy: str, version: int) -> None:
        """A version was promoted."""
        self._promoted.labels(policy).set(version)

    def pressed(self, closed: bool, waiting: int) -> None:
        """Whether it asks for no more rollouts, and how many full batches wait."""
        self._pressure.set(float(closed))
        self._batches.set(waiting)

    def waits(self, reason: str) -> None:
        """For want of `rollouts`, until a newer version is `served`, or for its `window`; "": it trains."""
        for each in WAITS:
            self._waiting.labels(each).set(float(each == reason))
