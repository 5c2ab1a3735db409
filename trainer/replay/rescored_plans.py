"""The rollouts and plans of a run under new rewards. Pure.

A rescored rollout is a record under its own key, task and policy name, so nothing takes it for a recorded one. A plan
keeps its step and the order of its rollouts; which parts of them train is decided again, by the run's own settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from schemas.digest import with_digest
from schemas.ids import derived_id, parse_policy_name, policy_name
from schemas.records import BatchPlan, Drop, PlanRow, PolicySpan, Rollout
from trainer.advantages.baseline import RunningBaseline
from trainer.advantages.batch import estimate_advantages
from trainer.config.trainer_config import TrainerConfig
from trainer.data.candidates import offer_of
from trainer.data.plan import lay_out, with_plan_id
from trainer.replay.changed_baselines import rewarded_samples
from trainer.replay.rescored_rewards import RescoredRewards, rescored_provenance


def rescored_rollout(rollout: Rollout, rewards: RescoredRewards, run_id: str, policy: str) -> Rollout:
    """Returns a recorded rollout with its new reward and its group's new statistics, as a rollout of run `run_id`.

    The key and the task get the run's id in front: the order of the ids, which estimators follow, stays the same.
    """
    head = rollout.head
    late = rollout.rollout_id != f"{head.task_id}/{rollout.sample_index}"
    new = None if late else rewards.scores.get(rollout.result_id)
    score = None if new is None else new[0]
    reward = None if score is None else score.reward
    group = None if late else rewards.groups[head.task_id]
    key = f"{run_id}/{rollout.rollout_id}"
    return with_digest(
        rollout.model_copy(
            update={
                "rollout_id": key,
                "rollout_event_id": derived_id("rollout", key),
                "head": head.model_copy(
                    update={"task_id": f"{run_id}/{head.task_id}", "policy": policy, "run_id": run_id}
                ),
                "policy_spans": tuple(_renamed(span, head.policy, policy) for span in rollout.policy_spans),
                "reward": reward,
                "has_rl": reward is not None,
                "components": {} if score is None else score.components,
                "step_scores": b"" if score is None else score.step_scores,
                "step_spans": () if score is None else score.step_spans,
                "group_mean": None if group is None else group.mean,
                "group_std": None if group is None else group.std,
                "n_rewarded": rollout.n_rewarded if group is None else group.n_rewarded,
                "provenance": rescored_provenance(rollout, new),
            }
        )
    )


def _renamed(span: PolicySpan, recorded: str, policy: str) -> PolicySpan:
    name, version = parse_policy_name(span.policy)
    return span.model_copy(update={"policy": policy_name(policy, version)}) if name == recorded else span


@dataclass(frozen=True, slots=True)
class RescoredStep:
    """A plan of rescored rollouts, and those rollouts in the plan's order. Their places on the log are not known yet:
    the rows have those of the recorded ones."""

    plan: BatchPlan
    rollouts: tuple[Rollout, ...]


def replanned(
    plan: BatchPlan, rollouts: Sequence[Rollout], config: TrainerConfig, baseline: RunningBaseline
) -> tuple[RescoredStep, RunningBaseline]:
    """Returns the plan under new rewards, and the running baseline after its step.

    `rollouts`: the rescored ones, in the order of the plan's rows. `config`: that of the plan's own manifest. A rollout
    that the settings leave out under its new reward becomes a drop, with the reason. The whole rest of the step's data
    is as recorded.
    """
    loss = config.loss
    rows: list[PlanRow] = []
    kept: list[Rollout] = []
    drops: list[Drop] = []
    for row, rollout in zip(plan.rows, rollouts, strict=True):
        offer = offer_of(rollout, row.partition, row.offset, 0, config.max_rollout_tokens, loss)
        if offer.unfit is not None:
            drops.append(_drop(row, offer.unfit))
            continue
        update = {"rollout_id": rollout.rollout_id, "digest": rollout.digest, "rl": offer.rl, "opd": offer.opd}
        rows.append(row.model_copy(update=update))
        kept.append(rollout)
    groups = [rollout.head.task_id for rollout in kept]
    laid_out = lay_out(rows, groups, plan.world_size, config.micro_batch_tokens, loss.pair.weight > 0)
    decay = loss.baseline_decay
    changed = plan.model_copy(
        update={
            "rows": tuple(laid_out),
            "drops": (*plan.drops, *drops),
            "baseline": None if decay is None else baseline.mean,
        }
    )
    samples = rewarded_samples(rows, {rollout.rollout_id: rollout for rollout in kept})
    sums = estimate_advantages(samples, loss, changed.baseline).metrics
    step = RescoredStep(with_plan_id(changed), tuple(kept))
    return step, baseline.after(sums, 1.0 if decay is None else decay)


def _drop(row: PlanRow, reason: str) -> Drop:
    return Drop(partition=row.partition, first_offset=row.offset, last_offset=row.offset, count=1, reason=reason)


def new_drops(recorded: Sequence[BatchPlan], changed: Sequence[BatchPlan]) -> Iterator[tuple[str, int]]:
    """Yields reason and count of the drops that plans have beyond the recorded ones."""
    for before, after in zip(recorded, changed, strict=True):
        yield from ((drop.reason, drop.count) for drop in after.drops[len(before.drops) :])


def counted(pairs: Iterator[tuple[str, int]]) -> Mapping[str, int]:
    """Returns the sums by name, in the order of the names."""
    sums: dict[str, int] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items()))
