"""The running baseline of a counterfactual whose settings change it. Pure.

A plan records the baseline that its step used. A counterfactual that switches baselines on, or changes their decay or
the shape of the rewards, has other ones: they are computed again from the rewards of its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.records import BatchPlan, PlanRow, Rollout
from trainer.advantages.baseline import RunningBaseline
from trainer.advantages.batch import estimate_advantages
from trainer.advantages.rewarded_sample import RewardedSample, rewarded_sample
from trainer.config.loss import LossConfig
from trainer.replay.recording import CannotReplay, RunRecording


@dataclass(frozen=True, slots=True)
class ChangedLoss:
    """The loss of a recorded manifest, and that of its counterfactual."""

    recorded: LossConfig
    changed: LossConfig

    @property
    def has_new_baseline(self) -> bool:
        """True if the counterfactual's steps use other baselines than the plans record."""
        decay = self.changed.baseline_decay
        return decay is not None and _baseline_settings(self.recorded) != _baseline_settings(self.changed)


def _baseline_settings(loss: LossConfig) -> tuple[object, ...]:
    return loss.baseline_decay, loss.by_steps, loss.step_weight, loss.overlong


def with_changed_baselines(
    recording: RunRecording,
    losses: Mapping[str, ChangedLoss],
    look_up: Callable[[Sequence[PlanRow]], Mapping[str, Rollout]],
) -> RunRecording:
    """Returns the recording with the baselines of the changed settings in its plans; the same recording if they change
    none. `losses`: by the digest of the recorded manifest. `look_up`: returns rollouts by key. Raises CannotReplay if
    the baseline before the first plan is not known."""
    if not any(losses[plan.manifest_digest].has_new_baseline for plan in recording.plans):
        return recording
    rollouts = look_up([row for plan in recording.plans for row in plan.rows])
    samples = [rewarded_samples(plan.rows, rollouts) for plan in recording.plans]
    singles = any(sample.n_requested == 1 for each in samples for sample in each)
    baseline = _first_baseline(recording) if singles else RunningBaseline()
    plans: list[BatchPlan] = []
    for plan, of_plan in zip(recording.plans, samples, strict=True):
        loss = losses[plan.manifest_digest].changed
        decay = loss.baseline_decay
        plans.append(plan.model_copy(update={"baseline": None if decay is None else baseline.mean}))
        sums = estimate_advantages(of_plan, loss, plans[-1].baseline).metrics
        baseline = baseline.after(sums, 1.0 if decay is None else decay)
    return replace(recording, plans=tuple(plans))


def rewarded_samples(rows: Sequence[PlanRow], rollouts: Mapping[str, Rollout]) -> list[RewardedSample]:
    """Returns the samples of a plan's rows whose reward is trained on. `rollouts`: by key."""
    found = (rewarded_sample(rollouts[row.rollout_id]) for row in rows if row.rl)
    return [sample for sample in found if sample is not None]


def _first_baseline(recording: RunRecording) -> RunningBaseline:
    first = recording.results[0]
    metrics = {} if recording.beginning is None else dict(recording.beginning.state.metrics)
    metrics |= dict(first.metrics)
    if first.step > 0 and not RunningBaseline.recorded_in(metrics):
        raise CannotReplay(
            f"the results up to step {first.step} have no sums of rewards, with which the changed baseline begins: "
            "they are of a version without baselines. Begin with step 1 (omit --from-step), or leave out the change"
        )
    return RunningBaseline.of_metrics(metrics)
