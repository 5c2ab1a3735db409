"""A run's rollouts and plans under the scores of another verifier. Nothing is trained here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.digest import digest_holds
from schemas.place import RecordPlace
from schemas.records import Provenance, Rollout, Sample, Score, Source, TokenSpan
from schemas.tensors import float32_bytes
from tentalis.cli.main import app
from tests.support.trainer_lab import config, rollout
from tests.unit.trainer.test_step import plan_for
from trainer.advantages.baseline import RunningBaseline
from trainer.data.candidates import EQUAL_REWARDS, LONE_REWARD
from trainer.replay.rescored_plans import counted, new_drops, replanned, rescored_rollout
from trainer.replay.rescored_rewards import (
    CannotRescore,
    GroupStatistics,
    RecordedAnswer,
    RescoredRewards,
    VerifierScores,
)
from trainer.replay.rescored_run import UnscoredAnswers

LABEL = "math/math@2"
RUN, POLICY = "run.cf-1", "tiny.cf-1"


def group(task_id: str, rewards: Sequence[float | None], **more: Any) -> list[Rollout]:
    """A group whose answers have a Score of the scorer `old`."""
    known = [reward for reward in rewards if reward is not None]
    return [
        rollout(task_id, i, reward=reward, rewards=known, n=len(rewards), provenance=(of_half(task_id, i),), **more)
        for i, reward in enumerate(rewards)
    ]


def of_half(task_id: str, index: int) -> Provenance:
    return Provenance(half="score", half_id=f"old-{task_id}-{index}", topic="halves", partition=0, offset=index)


def score(of: Rollout, reward: float | None, scorer: str = LABEL, **more: Any) -> Score:
    sample = Sample(
        head=of.head,
        sample_index=of.sample_index,
        result_id=of.result_id,
        response_digest="d",
        token_ids=of.token_ids,
        loss_mask=of.loss_mask,
        sampler_logprobs=of.sampler_logprobs,
    )
    values = {
        "score_id": f"{scorer}-{of.result_id}" if scorer == LABEL else f"old-{of.head.task_id}-{of.sample_index}",
        "event_time": 1,
        "opened_at": 1,
        "sample": sample,
        "source": Source.RESULT,
        "reward": reward,
        "scorer": scorer,
    }
    return Score(**(values | more))


def scores_of(rollouts: Sequence[Rollout], rewards: Sequence[float | None], label: str = LABEL) -> VerifierScores:
    scores = VerifierScores(label, {each.result_id for each in rollouts})
    for i, (each, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        scores.apply(score(each, 0.0, "old"), RecordPlace("halves", 0, i))
        scores.apply(score(each, reward), RecordPlace("halves", 0, 100 + i))
    return scores


def rewards_of(rollouts: Sequence[Rollout], scores: VerifierScores) -> RescoredRewards:
    return RescoredRewards.of(map(RecordedAnswer.of, rollouts), scores)


def test_the_statistics_are_those_of_the_whole_group_under_the_new_scores() -> None:
    answers = group("t", [1.0, 0.0, 0.0, 0.0])
    new = rewards_of(answers, scores_of(answers, [0.0, 1.0, 1.0, None]))
    mean, std = 2 / 3, (2 / 9) ** 0.5
    found = new.groups["t"]
    assert found.n_rewarded == 3 and found.mean == pytest.approx(mean) and found.std == pytest.approx(std)
    assert (new.recorded, new.unscored) == ("old", {})
    changed = rescored_rollout(answers[1], new, RUN, POLICY)
    assert (changed.reward, changed.has_rl, changed.n_rewarded, changed.n_closed) == (1.0, True, 3, 4)
    assert (changed.group_mean, changed.group_std) == (found.mean, found.std)
    unknown = rescored_rollout(answers[3], new, RUN, POLICY)
    assert (unknown.reward, unknown.has_rl) == (None, False)
    whole = rewards_of(answers, scores_of(answers, [0.0, 1.0, 1.0, 0.0]))
    assert whole.groups["t"] == GroupStatistics(None, 0.5, 0.5)


def test_a_rescored_rollout_is_nobody_elses() -> None:
    """No trainer of the policy, and no guard of a version, may take it for a recorded one."""
    (answer,) = group("t", [1.0])
    fields: dict[str, Any] = {"components": {"part": 0.5}, "step_scores": float32_bytes([0.25])}
    new_score = score(answer, 0.5, step_spans=(TokenSpan(start=4, end=7),), **fields)
    scores = VerifierScores(LABEL, {answer.result_id})
    scores.apply(new_score, RecordPlace("halves", 3, 7))
    changed = rescored_rollout(answer, rewards_of([answer], scores), RUN, POLICY)
    assert (changed.rollout_id, changed.head.task_id, changed.head.run_id) == (f"{RUN}/t/0", f"{RUN}/t", RUN)
    assert changed.head.policy == POLICY and {span.policy for span in changed.policy_spans} == {f"{POLICY}@v0"}
    assert changed.rollout_event_id != answer.rollout_event_id and changed.event_time == answer.event_time
    assert digest_holds(changed) and changed.digest != answer.digest
    assert (changed.components, changed.step_scores, len(changed.step_spans)) == (
        {"part": 0.5},
        fields["step_scores"],
        1,
    )
    (half,) = changed.provenance
    assert (half.half_id, half.topic, half.partition, half.offset) == (new_score.score_id, "halves", 3, 7)
    kept = ("token_ids", "loss_mask", "sampler_logprobs", "sampling", "result_id", "has_opd", "teacher_logprobs")
    assert all(getattr(changed, name) == getattr(answer, name) for name in kept)


def test_an_answer_without_a_score_is_named_and_has_no_reward() -> None:
    answers = group("t", [1.0, 0.0, 1.0])
    scores = scores_of(answers[:2], [1.0, 0.0])
    scores.results = {each.result_id for each in answers}
    new = rewards_of(answers, scores)
    assert new.unscored == {"t/2": f"no score of {LABEL}"}
    assert new.groups["t"] == GroupStatistics(2, 0.5, 0.5), "it is not in the statistics"
    left = rescored_rollout(answers[2], new, RUN, POLICY)
    assert (left.reward, left.has_rl, left.provenance) == (None, False, ())
    message = str(UnscoredAnswers(new))
    assert f"unscored: t/2: no score of {LABEL}" in message and "1 rewarded rollouts" in message
    with pytest.raises(CannotRescore, match=r"no score of other/x@1 .* math/math@2 \(3 answers\), old \(3 answers\)"):
        rewards_of(answers, scores_of(answers, [1.0, 0.0, 0.0], "other/x@1"))


def test_an_answer_of_an_erased_user_is_named_even_if_it_has_a_score() -> None:
    answers = group("t", [1.0, 0.0])
    scores = scores_of(answers, [0.0, 1.0])
    erased = answers[1].model_copy(update={"forgotten": True, "has_rl": False})
    new = rewards_of([answers[0], erased], scores)
    assert new.unscored == {"t/1": "its user or session was erased"} and new.groups["t"].n_rewarded == 1


def test_what_had_no_reward_is_not_missed_and_a_late_hint_is_in_no_group() -> None:
    hinted = group("t", [1.0, None], teacher=[-1.0, -1.0, -1.0])
    late = rollout("t", 2, reward=None, teacher=[-1.0, -1.0, -1.0], rollout_id="t/2/opd/h", n=3)
    scores = scores_of([hinted[0], late], [0.0, 1.0])
    new = rewards_of([*hinted, late], scores)
    assert not new.unscored and new.groups["t"] == GroupStatistics(None, 0.0, 0.0)
    changed = rescored_rollout(late, new, RUN, POLICY)
    assert (changed.reward, changed.n_closed, changed.group_mean) == (None, late.n_closed, None)
    assert changed.rollout_id == f"{RUN}/t/2/opd/h" and digest_holds(changed)


def test_two_scores_of_one_answer_that_differ_are_refused() -> None:
    (answer,) = group("t", [1.0])
    scores = VerifierScores(LABEL, {answer.result_id})
    scores.apply(score(answer, 0.0), RecordPlace("halves", 0, 1))
    scores.apply(score(answer, 0.0), RecordPlace("halves", 0, 2))  # written twice
    with pytest.raises(
        CannotRescore, match=r"two different scores of sample 0 of task t: 0.0 at halves\[0\]@1 and 1.0"
    ):
        scores.apply(score(answer, 1.0), RecordPlace("halves", 0, 3))


def test_the_digest_names_the_label_and_every_new_reward() -> None:
    answers = group("t", [1.0, 0.0])
    same, again = (rewards_of(answers, scores_of(answers, [1.0, 0.0])) for _ in range(2))
    other = rewards_of(list(reversed(answers)), scores_of(answers, [1.0, 0.5]))
    fewer = scores_of(answers[:1], [1.0])
    assert same.digest == again.digest
    assert len({same.digest, other.digest, rewards_of(answers, fewer).digest}) == 3


def replan(recorded: list[Rollout], new: Sequence[float | None], **loss: Any) -> tuple[Any, Any]:
    rewards = rewards_of(recorded, scores_of(recorded, new))
    changed = [rescored_rollout(each, rewards, RUN, POLICY) for each in recorded]
    plan = plan_for(recorded)
    (step, _) = replanned(plan, changed, config(Path("m"), loss=loss), RunningBaseline())
    return plan, step


def test_a_plan_keeps_its_rollouts_in_their_order_and_on_their_places() -> None:
    recorded = [*group("t1", [1.0, 0.0, 1.0]), *group("t0", [0.5, 0.0])]
    plan, step = replan(recorded, [0.0, 1.0, 0.5, 1.0, 0.0])
    assert [row.rollout_id for row in step.plan.rows] == [f"{RUN}/{row.rollout_id}" for row in plan.rows]
    assert [(row.rank, row.micro_batch) for row in step.plan.rows] == [(r.rank, r.micro_batch) for r in plan.rows]
    assert [row.digest for row in step.plan.rows] == [each.digest for each in step.rollouts]
    assert (step.plan.step, step.plan.seed, step.plan.drops) == (plan.step, plan.seed, ())


def test_the_runs_own_settings_decide_what_the_new_rewards_leave_out() -> None:
    recorded = [*group("t1", [1.0, 0.0]), *group("t2", [1.0, 0.0]), *group("t3", [1.0, 0.0], teacher=[-1.0] * 3)]
    new = [1.0, 1.0, 1.0, None, 1.0, 1.0]
    plan, step = replan(recorded, new, kind="dapo")
    rows = {row.rollout_id.removeprefix(f"{RUN}/"): (row.rl, row.opd) for row in step.plan.rows}
    assert rows == {"t3/0": (False, True), "t3/1": (False, True)}, "hints need no reward"
    assert counted(new_drops([plan], [step.plan])) == {
        EQUAL_REWARDS: 2,
        LONE_REWARD: 1,
        "neither reward nor teacher": 1,
    }
    assert [drop.first_offset for drop in step.plan.drops] == [0, 1, 2, 3]
    _, plain = replan(recorded, new)
    assert len(plain.plan.rows) == 4, "equal rewards stay where the loss does not leave them out"


def test_a_step_may_lose_all_its_rollouts() -> None:
    plan, step = replan(group("t", [1.0, 0.0]), [1.0, 1.0], kind="dapo")
    assert step.plan.rows == () and sum(drop.count for drop in step.plan.drops) == len(plan.rows)


def test_the_running_baseline_is_that_of_the_new_rewards() -> None:
    recorded = [answer for i in range(2) for answer in group(f"t{i}", [1.0])]
    rewards = rewards_of(recorded, scores_of(recorded, [0.25, 0.75]))
    changed = [rescored_rollout(each, rewards, RUN, POLICY) for each in recorded]
    before = RunningBaseline(1.0, 4.0)
    step, after = replanned(plan_for(recorded), changed, config(Path("m")), before)
    assert step.plan.baseline == 0.25 and after == before.after({"single_rewards": 1.0, "single_answers": 2.0}, 0.9)
    step, after = replanned(plan_for(recorded), changed, config(Path("m"), loss={"baseline_decay": None}), before)
    assert step.plan.baseline is None and after == RunningBaseline(2.0, 6.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verifier", LABEL, "--verify-only"], "--verifier cannot be combined with --verify-only"),
        (["--verifier", LABEL, "--ranks", "2"], "--verifier cannot be combined"),
        (["--allow-unscored"], "--allow-unscored needs --verifier"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["replay", "run", *options])
    assert done.exit_code == 2 and message in done.output
