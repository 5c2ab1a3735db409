"""The trainer's metrics: rank 0 updates them as it plans and steps."""

import time
from collections.abc import Iterable, Mapping

from schemas.records import Drop
from tentalis.service.health import RECOVERING
from tentalis.service.metrics import LONG_SECONDS, Exporter, Metric, MetricKind
from trainer.data.batch_stats import AGE_BUCKETS, JOINED_KINDS
from trainer.run.tracking import MetricTrackers, token_rate

TRAINER_STEPS = Metric(
    "tentalis_trainer_steps_total", MetricKind.COUNTER, "Steps completed by this process.", ("trainer",), unit="steps"
)
TRAINER_STEP = Metric("tentalis_trainer_step", MetricKind.GAUGE, "Last complete step of the run.", ("trainer",))
TRAINER_VERSION = Metric(
    "tentalis_trainer_policy_version", MetricKind.GAUGE, "Newest version published.", ("trainer",), ("policy",)
)
TRAINER_PROMOTED = Metric(
    "tentalis_trainer_promoted_version",
    MetricKind.GAUGE,
    "Promoted version that the trainer knows of.",
    ("trainer",),
    ("policy",),
)
TRAINER_STEP_SECONDS = Metric(
    "tentalis_trainer_step_seconds",
    MetricKind.HISTOGRAM,
    "Time of a step, from its plan until its version is published.",
    ("trainer",),
    unit="seconds",
    buckets=LONG_SECONDS,
)
TRAINER_PHASE_SECONDS = Metric(
    "tentalis_trainer_phase_seconds_total",
    MetricKind.COUNTER,
    "Time of the steps by phase: fetch, pack, forward_backward, optimizer, commit_wait (for the commit of the step "
    "before), publish (the commit, while the next step may be computed).",
    ("trainer",),
    ("phase",),
    "seconds",
)
TRAINER_TOKENS = Metric(
    "tentalis_trainer_tokens_total",
    MetricKind.COUNTER,
    "Tokens of the rollouts trained on.",
    ("trainer",),
    unit="tokens",
)
TRAINER_SPEED = Metric(
    "tentalis_trainer_tokens_per_second",
    MetricKind.GAUGE,
    "Tokens per second of the last step, without its commit.",
    ("trainer",),
)
TRAINER_ROLLOUTS = Metric(
    "tentalis_trainer_rollouts_total",
    MetricKind.COUNTER,
    "Rollouts of completed steps: those with a gradient (trained) and those without (idle).",
    ("trainer",),
    ("use",),
    "rollouts",
)
TRAINER_LOSS = Metric(
    "tentalis_trainer_loss",
    MetricKind.GAUGE,
    "Loss of the last step by part, unweighted: rl, opd, kl, pair.",
    ("trainer",),
    ("part",),
)
TRAINER_CLIPPED = Metric(
    "tentalis_trainer_clipped_ratio",
    MetricKind.GAUGE,
    "Share of the last step's tokens whose importance ratio was clipped, by part.",
    ("trainer",),
    ("part",),
    "ratio",
)
TRAINER_ADVANTAGE = Metric(
    "tentalis_trainer_advantage_magnitude",
    MetricKind.GAUGE,
    "Mean absolute advantage of the last step by part; 0 trains nothing.",
    ("trainer",),
    ("part",),
)
TRAINER_REWARD = Metric("tentalis_trainer_reward", MetricKind.GAUGE, "Mean reward of the last step.", ("trainer",))
TRAINER_REWARD_STD = Metric(
    "tentalis_trainer_reward_deviation",
    MetricKind.GAUGE,
    "Standard deviation of the last step's rewards.",
    ("trainer",),
)
TRAINER_AGES = Metric(
    "tentalis_trainer_rollout_ages_total",
    MetricKind.COUNTER,
    "Rollouts of completed steps by age in versions: 0, 1, 2, 3_4, 5_8, 9_up.",
    ("trainer",),
    ("age",),
    "rollouts",
)
TRAINER_JOINS = Metric(
    "tentalis_trainer_joins_total",
    MetricKind.COUNTER,
    "Rollouts of completed steps by the halves that they were joined from: rl, opd, both.",
    ("trainer",),
    ("kind",),
    "rollouts",
)
TRAINER_HINTS = Metric(
    "tentalis_trainer_hint_acceptance_ratio",
    MetricKind.GAUGE,
    "Share of the hints requested by the last step's tasks that became a teacher.",
    ("trainer",),
    unit="ratio",
)
TRAINER_RATIO = Metric(
    "tentalis_trainer_importance_ratio",
    MetricKind.GAUGE,
    "Mean ratio of the trained policy's probabilities to the sampler's, last step; 1 on policy.",
    ("trainer",),
    unit="ratio",
)
TRAINER_ESS = Metric(
    "tentalis_trainer_effective_sample_ratio",
    MetricKind.GAUGE,
    "Effective sample size over n of the last step: (sum w)^2 / (n sum w^2) of the importance ratios w; 1 on policy.",
    ("trainer",),
    unit="ratio",
)
TRAINER_MFU = Metric(
    "tentalis_trainer_mfu_ratio",
    MetricKind.GAUGE,
    "Share of the device's peak matrix throughput that the last step's forward and backward pass used, with causal "
    "attention.",
    ("trainer",),
    unit="ratio",
)
TRAINER_STALENESS = Metric(
    "tentalis_trainer_staleness_versions",
    MetricKind.GAUGE,
    "Mean age of the last step's rollouts, in versions.",
    ("trainer",),
    unit="versions",
)
TRAINER_KL = Metric(
    "tentalis_trainer_sampler_kl",
    MetricKind.GAUGE,
    "Estimated KL divergence of the sampler from the trained policy, last step.",
    ("trainer",),
    unit="nats",
)
TRAINER_ENTROPY = Metric(
    "tentalis_trainer_entropy", MetricKind.GAUGE, "Mean entropy of the policy, last step.", ("trainer",), unit="nats"
)
TRAINER_GRADIENT = Metric(
    "tentalis_trainer_gradient_norm", MetricKind.GAUGE, "Norm of the last step's gradient.", ("trainer",)
)
TRAINER_RATE = Metric(
    "tentalis_trainer_learning_rate", MetricKind.GAUGE, "Learning rate of the last step, by its schedule.", ("trainer",)
)
TRAINER_PENDING = Metric(
    "tentalis_trainer_pending_offers",
    MetricKind.GAUGE,
    "Rollouts that were read, but not yet considered by a plan.",
    ("trainer",),
    unit="rollouts",
)
TRAINER_DROPS = Metric(
    "tentalis_trainer_drops_total",
    MetricKind.COUNTER,
    "Rollouts that a plan left out, by reason.",
    ("trainer",),
    ("reason",),
    "rollouts",
)
TRAINER_LAG = Metric(
    "tentalis_trainer_lag_records",
    MetricKind.GAUGE,
    "Records of the rollout topic not yet read at the last poll.",
    ("trainer",),
    ("partition",),
    "records",
)
TRAINER_DEAD = Metric(
    "tentalis_trainer_dead_letters_total",
    MetricKind.COUNTER,
    "Records sent to the dead-letter topic, by all ranks.",
    ("trainer",),
    unit="records",
)
TRAINER_WITHOUT_TOPK = Metric(
    "tentalis_trainer_without_topk_total",
    MetricKind.COUNTER,
    "Rollouts whose hint trains nothing: the loss needs the teacher's top-K tokens, and the hint has none.",
    ("trainer",),
    unit="rollouts",
)
TRAINER_WAITING = Metric(
    "tentalis_trainer_waiting",
    MetricKind.GAUGE,
    "1 for the reason of a wait: rollouts (for a batch), served (for a promotion), window (for the training hours); "
    "all 0 while the trainer trains.",
    ("trainer",),
    ("reason",),
)
TRAINER_PRESSURE = Metric(
    "tentalis_trainer_back_pressure", MetricKind.GAUGE, "1 while the trainer asks for no more rollouts.", ("trainer",)
)
TRAINER_BATCHES = Metric(
    "tentalis_trainer_waiting_batches",
    MetricKind.GAUGE,
    "Full batches that wait for a step.",
    ("trainer",),
    unit="batches",
)
TRAINER_TURN = Metric(
    "tentalis_trainer_turn_timestamp_seconds",
    MetricKind.GAUGE,
    "Time of the last turn of the training loop, since the epoch.",
    ("trainer",),
    unit="seconds",
)

WAIT_REASONS = ("rollouts", "served", "window")
PARTS = ("rl", "opd")
LOSSES = (*PARTS, "kl", "pair")


class TrainerMetrics:
    """The metrics and the readiness of the trainer. The training thread writes them, the HTTP thread reads them."""

    def __init__(self) -> None:
        self.exporter = exporter = Exporter("trainer")
        self._ready = False
        self._reported_dead: dict[int, int] = {}
        self._reported_without_topk: dict[int, int] = {}
        self._steps = exporter.counter(TRAINER_STEPS)
        self._step = exporter.gauge(TRAINER_STEP)
        self._version = exporter.gauge(TRAINER_VERSION)
        self._promoted = exporter.gauge(TRAINER_PROMOTED)
        self._step_seconds = exporter.histogram(TRAINER_STEP_SECONDS)
        self._phase_seconds = exporter.counter(TRAINER_PHASE_SECONDS)
        self._tokens = exporter.counter(TRAINER_TOKENS)
        self._speed = exporter.gauge(TRAINER_SPEED)
        self._rollouts = exporter.counter(TRAINER_ROLLOUTS)
        self._part_gauges = {
            "loss": exporter.gauge(TRAINER_LOSS),
            "clip_fraction": exporter.gauge(TRAINER_CLIPPED),
            "advantage_abs": exporter.gauge(TRAINER_ADVANTAGE),
        }
        self._step_gauges = {
            "reward_mean": exporter.gauge(TRAINER_REWARD),
            "reward_std": exporter.gauge(TRAINER_REWARD_STD),
            "hint_acceptance": exporter.gauge(TRAINER_HINTS),
            "ratio_mean": exporter.gauge(TRAINER_RATIO),
            "effective_sample_size": exporter.gauge(TRAINER_ESS),
            "staleness_mean": exporter.gauge(TRAINER_STALENESS),
            "mismatch_kl": exporter.gauge(TRAINER_KL),
            "entropy": exporter.gauge(TRAINER_ENTROPY),
            "grad_norm": exporter.gauge(TRAINER_GRADIENT),
            "learning_rate": exporter.gauge(TRAINER_RATE),
        }
        self._ages = exporter.counter(TRAINER_AGES)
        self._joins = exporter.counter(TRAINER_JOINS)
        self._mfu = exporter.gauge(TRAINER_MFU)
        self._peak = 0.0
        self._trackers: MetricTrackers | None = None
        self._pending = exporter.gauge(TRAINER_PENDING)
        self._drops = exporter.counter(TRAINER_DROPS)
        self._lag = exporter.gauge(TRAINER_LAG)
        self._dead_letters = exporter.counter(TRAINER_DEAD)
        self._without_topk = exporter.counter(TRAINER_WITHOUT_TOPK)
        self._waiting = exporter.gauge(TRAINER_WAITING)
        self._pressure = exporter.gauge(TRAINER_PRESSURE)
        self._batches = exporter.gauge(TRAINER_BATCHES)
        self._turn = exporter.gauge(TRAINER_TURN)
        self.set_waiting("")

    def not_ready(self) -> str | None:
        """Returns the reason why the trainer is not ready; None once the run is recovered."""
        return None if self._ready else f"{RECOVERING}: loading the model, then the run from the log"

    def use_trackers(self, trackers: MetricTrackers, peak_flops: float) -> None:
        """Sends the following steps to these trackers instead of earlier ones. peak: FLOP/s of all ranks together, for
        MFU."""
        self.close()
        self._trackers, self._peak = trackers, peak_flops

    def close(self) -> None:
        """Closes the trackers."""
        if self._trackers is not None:
            self._trackers.close()

    def set_recovered(self, policy: str, step: int, version: int) -> None:
        """Sets the run's position after recovery and marks the trainer ready. The ranks' counts start from 0 again,
        after a rollback too."""
        self._reported_dead.clear()
        self._reported_without_topk.clear()
        self.set_position(policy, step, version)
        self._ready = True

    def set_position(self, policy: str, step: int, version: int) -> None:
        """Sets the run's last complete step and its version."""
        self._step.set(step)
        self._version.labels(policy).set(version)

    def record_turn(self) -> None:
        """Records one turn of the training loop."""
        self._turn.set(time.time())

    def record_report(self, rank: int, lag: Mapping[str, int], dead: int, without_topk: int = 0) -> None:
        """Records a rank's report: unread records per partition, and, both since the rank began, its dead letters and
        the rollouts without the top-K that the loss needs."""
        for partition, unread in lag.items():
            self._lag.labels(partition).set(unread)
        self._dead_letters.inc(dead - self._reported_dead.get(rank, 0))
        self._reported_dead[rank] = dead
        self._without_topk.inc(without_topk - self._reported_without_topk.get(rank, 0))
        self._reported_without_topk[rank] = without_topk

    def set_pending(self, count: int) -> None:
        """Sets the number of offers that no plan has considered."""
        self._pending.set(count)

    def record_plan(self, drops: Iterable[Drop], pending: int) -> None:
        """Records a plan that is on the log and about to be executed; `drops`: those that are new in it."""
        for drop in drops:
            self._drops.labels(drop.reason).inc(drop.count)
        self.set_pending(pending)
        self.set_waiting("")

    def record_step(
        self, policy: str, step: int, version: int, step_metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        """Records a complete step: its metrics and phases, as in its StepResult."""
        self._steps.inc()
        self.set_position(policy, step, version)
        self._step_seconds.observe(sum(seconds.values()))
        for phase, spent in seconds.items():
            self._phase_seconds.labels(phase).inc(spent)
        self._tokens.inc(step_metrics["tokens"])
        self._speed.set(token_rate(step_metrics["tokens"], seconds))
        self._rollouts.labels("trained").inc(step_metrics["trained_rollouts"])
        self._rollouts.labels("idle").inc(step_metrics["rollouts"] - step_metrics["trained_rollouts"])
        for name, gauge in self._part_gauges.items():
            for part in LOSSES if name == "loss" else PARTS:
                gauge.labels(part).set(step_metrics[f"{part}_{name}"])
        for name, gauge in self._step_gauges.items():
            gauge.set(step_metrics[name])
        for age in AGE_BUCKETS:
            self._ages.labels(age).inc(step_metrics[f"staleness_{age}"])
        for kind in JOINED_KINDS:
            self._joins.labels(kind).inc(step_metrics[f"joined_{kind}"])
        computing = seconds["forward_backward"] * self._peak
        mfu = step_metrics["model_flops"] / computing if computing else 0.0
        self._mfu.set(mfu)
        if self._trackers is not None:
            self._trackers.step(step, {**step_metrics, "mfu": mfu}, seconds)

    def set_promoted(self, policy: str, version: int) -> None:
        """Sets the promoted version."""
        self._promoted.labels(policy).set(version)

    def set_backpressure(self, closed: bool, waiting: int) -> None:
        """Sets the gauges of backpressure: `closed` if no more rollouts are wanted, and the number of full batches
        that wait."""
        self._pressure.set(float(closed))
        self._batches.set(waiting)

    def set_waiting(self, reason: str) -> None:
        """Sets the reason for waiting: `rollouts` (too few), `served` (for a newer served version), `window` (for its
        hours), or "" while it trains."""
        for known in WAIT_REASONS:
            self._waiting.labels(known).set(float(known == reason))
