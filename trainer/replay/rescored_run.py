"""Reads the new rewards of a run from the log, and writes its rescored rollouts to it.

In: the scores of a verifier on the halves log (`tentalis rescore`), the recorded rollouts. Out: rollouts under the name
of the counterfactual run, and the plans that name them. The decisions are in rescored_rewards.py and rescored_plans.py.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas import topics
from schemas.digest import digest_holds
from schemas.ids import rollout_task_id
from schemas.records import BatchPlan, Rollout
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import decoded
from tentalis.ops.forget.core import redacted_rollout
from tentalis.service.settings import Settings
from trainer.advantages.baseline import RunningBaseline
from trainer.config.trainer_config import TrainerConfig
from trainer.data.fetch import BadRollouts, RolloutCache, fetch, find_problems, readable_rollouts, rows_at
from trainer.replay.recording import CannotReplay, RunRecording
from trainer.replay.rescored_plans import replanned, rescored_rollout
from trainer.replay.rescored_rewards import CannotRescore, RecordedAnswer, RescoredRewards, VerifierScores

log = logging.getLogger(__name__)


class UnscoredAnswers(CannotReplay):
    """Rollouts with a recorded reward have no new score; the message names and counts them."""

    def __init__(self, rewards: RescoredRewards) -> None:
        names = [f"unscored: {rollout_id}: {reason}" for rollout_id, reason in rewards.unscored.items()]
        super().__init__(
            "\n".join(
                [
                    *names,
                    f"{len(names)} rewarded rollouts of the run's groups have no score of {rewards.label}. `tentalis "
                    f"rescore RUN --verifier {rewards.label}` scores answers and names those that it cannot score; "
                    "--allow-unscored trains without the rewards of these",
                ]
            )
        )


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The verifier whose scores replace the recorded rewards. `allow_unscored`: answers without such a score get no
    reward; otherwise they are refused."""

    label: str
    allow_unscored: bool = False


def read_rewards(source: RewardSource, plans: Sequence[BatchPlan], settings: Settings, codec: Codec) -> RescoredRewards:
    """Returns the new rewards of all groups with a rollout in the plans. Raises CannotReplay, UnscoredAnswers."""
    tasks = {rollout_task_id(row.rollout_id) for plan in plans for row in plan.rows}
    answers = _recorded_answers(tasks, settings, codec)
    scores = VerifierScores(source.label, {answer.result_id for answer in answers})
    try:
        for stored, record in decoded(read_to_end(settings, topics.HALVES), codec):
            scores.apply(record, stored.place)
        rewards = RescoredRewards.of(answers, scores)
    except CannotRescore as error:
        raise CannotReplay(str(error)) from error
    if rewards.unscored and not source.allow_unscored:
        raise UnscoredAnswers(rewards)
    return rewards


def _recorded_answers(tasks: Collection[str], settings: Settings, codec: Codec) -> list[RecordedAnswer]:
    """Returns all recorded rollouts of the tasks, also those that no plan has: they are in the groups' statistics."""
    found: dict[str, RecordedAnswer] = {}
    for stored, rollout in readable_rollouts(settings, codec):
        if rollout.head.task_id not in tasks:
            continue
        if not digest_holds(rollout):
            raise CannotReplay(
                f"forged: {rollout.rollout_id}: {stored.place} has content that does not match its digest "
                f"{rollout.digest}"
            )
        # A key has one record, and perhaps a redacted one after it.
        if rollout.rollout_id not in found or rollout.forgotten:
            found[rollout.rollout_id] = RecordedAnswer.of(rollout)
    return list(found.values())


def write_rollouts(
    recording: RunRecording,
    rewards: RescoredRewards,
    configs: Mapping[str, TrainerConfig],
    run_id: str,
    policy: str,
    settings: Settings,
    codec: Codec,
) -> RunRecording:
    """Writes the rescored rollouts of all plans to the log, and returns the recording with plans of these.

    configs: the recorded configurations, by digest of their manifest. A rollout that is there already is not written
    again, so its place, which the plan names, stays the same. Raises CannotReplay, BadRollouts.
    """
    present = {
        key for _, rollout in readable_rollouts(settings, codec) if (key := rollout.key).startswith(f"{run_id}/")
    }
    publisher = Publisher(settings, "tentalis-replay", codec)
    baseline = _first_baseline(recording, configs)
    plans: list[BatchPlan] = []
    for plan in recording.plans:
        recorded = fetch(settings, codec, plan.rows, RolloutCache())
        rollouts = [rescored_rollout(recorded[row.rollout_id], rewards, run_id, policy) for row in plan.rows]
        step, baseline = replanned(plan, rollouts, configs[plan.manifest_digest], baseline)
        plans.append(step.plan)
        _send(publisher, [rollout for rollout in step.rollouts if rollout.key not in present])
    publisher.flush()
    places: dict[str, tuple[int, int]] = {}
    rows = [row for plan in (*recording.plans, *plans) for row in plan.rows]
    if problems := find_problems(settings, codec, rows, None, places):
        erased = {problem.rollout_id for problem in problems if problem.kind == "forgotten"}
        _redact({f"{run_id}/{rollout_id}" for rollout_id in erased}, publisher, settings, codec)
        raise BadRollouts(problems)
    placed = [plan.model_copy(update={"rows": tuple(rows_at(plan.rows, places))}) for plan in plans]
    return replace(recording, plans=tuple(placed))


def _send(publisher: Publisher, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        publisher.send(topics.ROLLOUTS, rollout)


def _redact(keys: Collection[str], publisher: Publisher, settings: Settings, codec: Codec) -> None:
    """Redacts rescored rollouts whose recorded ones were redacted since they were read: the erasure may have read the
    topic before they were on it."""
    for stored, rollout in readable_rollouts(settings, codec):
        if rollout.key in keys and not rollout.forgotten:
            publisher.send(topics.ROLLOUTS, redacted_rollout(rollout), partition=stored.partition)
    publisher.flush()


def _first_baseline(recording: RunRecording, configs: Mapping[str, TrainerConfig]) -> RunningBaseline:
    """Returns the running baseline before the first plan: the steps before it keep their recorded rewards. Raises
    CannotReplay if the log does not have it."""
    first = recording.plans[0]
    metrics = {} if recording.beginning is None else dict(recording.beginning.state.metrics)
    baseline = RunningBaseline.of_metrics(metrics | dict(recording.results[0].metrics))
    if configs[first.manifest_digest].loss.baseline_decay is not None and baseline.mean != first.baseline:
        raise CannotReplay(
            f"the running baseline before step {first.step} is {baseline.mean} by the results on the log, and "
            f"{first.baseline} by the plan: begin with step 1, or at another step with --from-step"
        )
    return baseline
