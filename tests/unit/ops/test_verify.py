"""The verifier finds nothing in a consistent run, and each thing that can go wrong by the rule that forbids it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from schemas import topics
from schemas.digest import record_digest, with_digest
from schemas.ids import derived_id
from schemas.records import GIVEN_UP, Drop, Forget, OutcomeKind, PlanRow, PolicySpan, Position, Source, Terms, TokenSpan
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.ops.verify import Log, LoggedRecord, check
from tentalis.ops.verify.index import Index
from tentalis.ops.verify.model import ProblemKind
from tentalis.ops.verify.reader import UnknownRun, asked_by
from tentalis.ops.verify.training import Fates, TrainedRuns, rollouts_are_used
from tests.support.loop_records import lost, manifest, plan
from tests.support.trainer_lab import rollout
from tests.support.verify_run import PARTITION, RUN, Writer, altered, consistent, repeated, signed

Mutation = Callable[[Log], None]


def rules(log: Log) -> set[str]:
    return {problem.rule for problem in check(log).problems}


def test_a_consistent_run_has_no_problems() -> None:
    report = check(consistent())
    assert report.problems == []
    assert report.outcomes == {"both": 1, "expired": 1, "failed": 1, "late": 2, "rl": 2, "superseded": 1}
    expected = {"tasks": 5, "samples": 7, "results": 5, "rollouts": 5, "superseded": 1, "late": 2, "steps": 2}
    expected |= {"trained": 3, "dropped": 1, "ahead": 1, "open_tasks": 0, "repeats": 0, "steps_under_way": 0}
    assert report.numbers | expected == report.numbers


def test_versions_that_are_whole_models_are_no_problem() -> None:
    log = consistent()
    for index in range(len(log.updates)):
        altered(log.updates, index, rank=0)
    assert log.updates[0].record.is_whole_model and check(log).problems == []


def test_equal_repeats_are_counted_and_are_no_problem() -> None:
    log = consistent()
    for records in (log.tasks, log.results, log.feedback, log.scores, log.hints, log.outcomes, log.rollouts):
        repeated(records, 0)
    repeated(log.steps, 1)
    repeated(log.updates, 1)
    report = check(log)
    assert report.problems == []
    assert report.numbers["repeats"] == 7


def forge(log: Log) -> None:
    altered(log.rollouts, 0, reward=0.75)


def forge_with_a_digest_of_its_own(log: Log) -> None:
    repeated(log.rollouts, 0)
    last = log.rollouts[-1]
    record = with_digest(last.record.model_copy(update={"reward": 0.75}))
    log.rollouts[-1] = LoggedRecord(record, last.topic, last.partition, last.offset, last.timestamp)


def redigested(**changes: object) -> Mutation:
    """An altered rollout whose digest, outcome and plan agree with it: only the other rules can find it."""

    def mutate(log: Log) -> None:
        old = log.rollouts[0]
        record = with_digest(old.record.model_copy(update=changes))
        log.rollouts[0] = LoggedRecord(record, old.topic, old.partition, old.offset, old.timestamp)
        altered(log.outcomes, 0, rollout_digest=record.digest)
        plan = log.plans[0].record
        row = plan.rows[0].model_copy(update={"digest": record.digest})
        altered(log.plans, 0, rows=(row, *plan.rows[1:]))
        altered(log.plans, 0, plan_id=signed(log.plans[0].record).plan_id)
        altered(log.steps, 1, plan_id=log.plans[0].record.plan_id)

    return mutate


def trained_twice(log: Log) -> None:
    plan = log.plans[2].record
    altered(log.plans, 2, rows=(*plan.rows, log.plans[0].record.rows[0]))
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)


def reward_trained_twice(log: Log) -> None:
    plan, first = log.plans[2].record, log.plans[0].record.rows[0]
    assert first.rl
    late = first.model_copy(update={"rollout_id": f"{first.rollout_id}/grade/{derived_id('score', 'late')}"})
    altered(log.plans, 2, rows=(*plan.rows, late))
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)


def not_dropped(log: Log) -> None:
    altered(log.plans, 2, drops=())
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)


def drop_elsewhere(log: Log) -> None:
    drop = Drop(partition=PARTITION + 1, first_offset=3, last_offset=3, count=1, reason="stale")
    altered(log.plans, 2, drops=(drop,))
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)


def too_wide_a_drop(log: Log) -> None:
    drop = Drop(partition=PARTITION, first_offset=3, last_offset=4, count=1, reason="stale")
    altered(log.plans, 2, drops=(drop,))
    altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
    altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)


def wrong_row(**changes: object) -> Mutation:
    def mutate(log: Log) -> None:
        row = log.plans[2].record.rows[0].model_copy(update=changes)
        altered(log.plans, 2, rows=(row,))
        altered(log.plans, 2, plan_id=signed(log.plans[2].record).plan_id)
        altered(log.steps, 2, plan_id=log.plans[2].record.plan_id)

    return mutate


def altered_manifest_with_its_digest(log: Log) -> None:
    altered(log.manifests, 0, config="steps: 3")
    altered(log.manifests, 0, digest=record_digest(log.manifests[0].record, {"digest", "event_time"}))


def other_tokens_in_a_score(log: Log) -> None:
    altered(log.scores, 0, sample=log.scores[0].record.sample.model_copy(update={"response_digest": "other"}))


def half_of_no_result(log: Log) -> None:
    repeated(log.scores, 0, score_id="x", sample=log.scores[0].record.sample.model_copy(update={"result_id": "none"}))


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "another task under the id": (lambda log: repeated(log.tasks, 0, environment="math"), "task-rewritten"),
    "the open is lost": (lambda log: log.opens.pop(0) and None, "missing-open"),
    "a sample is still open": (lambda log: log.outcomes.pop(0) and None, "open-task"),
    "two outcomes of one key": (lambda log: repeated(log.outcomes, 0, worker_id="other"), "outcome-rewritten"),
    "an outcome of no sample": (
        lambda log: repeated(log.outcomes, 4, sample_index=7, outcome_key=f"{log.outcomes[4].record.head.task_id}/7"),
        "stray-outcome",
    ),
    "an outcome of another kind than its key": (
        lambda log: altered(log.outcomes, 2, kind=OutcomeKind.EMPTY),
        "stray-outcome",
    ),
    "an outcome with another head": (
        lambda log: altered(log.outcomes, 0, head=log.outcomes[0].record.head.model_copy(update={"policy": "x"})),
        "stray-outcome",
    ),
    "an outcome of an unknown result": (lambda log: altered(log.outcomes, 0, result_id="none"), "stray-outcome"),
    "the bound result superseded": (
        lambda log: altered(log.outcomes, 1, result_id=log.outcomes[2].record.result_id),
        "stray-outcome",
    ),
    "a late outcome of no half": (lambda log: altered(log.outcomes, 5, half_id="none"), "stray-outcome"),
    "a result without a trace": (lambda log: log.outcomes.pop(2) and None, "result-unaccounted"),
    "a result of no task": (
        lambda log: altered(
            log.results, 0, task=log.results[0].record.task.model_copy(update={"task_id": "gone"}), result_id="r"
        ),
        "stray-result",
    ),
    "a result that nobody scored": (lambda log: log.scores.pop(2) and None, "unscored-result"),
    "feedback without a hint": (lambda log: log.hints.pop(1) and None, "feedback-unanswered"),
    "a half that vanished in the join": (lambda log: log.outcomes.pop(5) and None, "half-unaccounted"),
    "a half on other tokens": (other_tokens_in_a_score, "half-mismatch"),
    "a half of no result": (half_of_no_result, "stray-half"),
    "bad bytes nowhere": (
        lambda log: log.undecodable.append(((topics.TASKS, 0, 9), "bad magic")),
        "undecodable-lost",
    ),
    "a forged rollout": (forge, "forged-rollout"),
    "a forged rollout under its key": (forge_with_a_digest_of_its_own, "forged-rollout"),
    "a rollout copied with another origin": (
        lambda log: repeated(log.rollouts, 0, provenance=()),
        "rollout-rewritten",
    ),
    "tokens of another answer": (redigested(token_ids=int32_bytes([1, 2, 9, 9])), "mixed-rollout"),
    "log-probs of another answer": (redigested(sampler_logprobs=float32_bytes([0, 0, -9, -9])), "mixed-rollout"),
    "another sampler": (redigested(policy_spans=(PolicySpan(start=2, policy="assistant@v9"),)), "mixed-rollout"),
    "the reward of another answer": (redigested(reward=0.25), "mixed-rollout"),
    "the teacher of another answer": (redigested(teacher_logprobs=float32_bytes([-7] * 4)), "mixed-rollout"),
    "the likeliest tokens of another answer": (
        redigested(topk=1, topk_ids=int32_bytes([7] * 4), topk_logprobs=float32_bytes([-1] * 4)),
        "mixed-rollout",
    ),
    "the hints of nobody": (redigested(hints=("Lie.",)), "mixed-rollout"),
    "another teacher": (redigested(teacher_policy="another"), "mixed-rollout"),
    "the components of another score": (redigested(components={"words": 8.0}), "mixed-rollout"),
    "the scores of other steps": (redigested(step_scores=float32_bytes([0.75])), "mixed-rollout"),
    "steps elsewhere": (redigested(step_spans=(TokenSpan(start=1, end=2),)), "mixed-rollout"),
    "steps that nobody scored": (
        lambda log: altered(log.rollouts, 3, step_scores=float32_bytes([0.5])),
        "mixed-rollout",
    ),
    "a wrong number of rewards": (redigested(n_rewarded=1), "group-statistics"),
    "a rollout of an unknown result": (redigested(result_id="none"), "mixed-rollout"),
    "an origin that is not there": (
        lambda log: altered(
            log.rollouts,
            0,
            provenance=tuple(p.model_copy(update={"offset": 999}) for p in log.rollouts[0].record.provenance),
        ),
        "mixed-rollout",
    ),
    "a reward that no score gave": (lambda log: altered(log.outcomes, 2, reward=0.125), "outcome-reward"),
    "components that no score gave": (
        lambda log: altered(log.outcomes, 2, components={"words": 8.0}),
        "outcome-reward",
    ),
    "components without a reward": (lambda log: altered(log.outcomes, 4, components={"words": 7.0}), "outcome-reward"),
    "a reason that the result does not give": (
        lambda log: altered(log.outcomes, 0, not_trainable="greedy sampling"),
        "not-trainable",
    ),
    "a failure that is kept quiet": (lambda log: altered(log.outcomes, 6, not_trainable=None), "not-trainable"),
    "a reason where there can be no rollout": (
        lambda log: altered(log.outcomes, 4, not_trainable="greedy sampling"),
        "not-trainable",
    ),
    "a wrong group mean": (redigested(group_mean=0.25), "group-statistics"),
    "a wrong group size": (lambda log: altered(log.outcomes, 0, n_closed=1), "group-statistics"),
    "a rollout that no outcome names": (
        lambda log: altered(log.outcomes, 1, rollout_id=None, rollout_digest=None, has_rl=False),
        "stray-rollout",
    ),
    "a rollout that is gone": (lambda log: log.rollouts.pop(1) and None, "missing-rollout"),
    "an outcome with another digest": (lambda log: altered(log.outcomes, 0, rollout_digest="x"), "forged-rollout"),
    "an outcome of the wrong kind": (lambda log: altered(log.outcomes, 0, kind=OutcomeKind.OPD), "outcome-kind"),
    "an outcome with another reward": (lambda log: altered(log.outcomes, 0, reward=0.0), "outcome-rollout"),
    "trained twice": (trained_twice, "trained-twice"),
    "the reward of a sample trained twice": (reward_trained_twice, "trained-twice"),
    "left out silently": (not_dropped, "untrained-rollout"),
    "dropped on another partition": (drop_elsewhere, "untrained-rollout"),
    "more in a drop than it counts": (too_wide_a_drop, "drop-count"),
    "planned under another digest": (wrong_row(digest="x"), "forged-rollout"),
    "planned with a part it lacks": (wrong_row(opd=True), "plan-row"),
    "planned with another length": (wrong_row(n_tokens=99), "plan-row"),
    "planned from a place it never had": (wrong_row(offset=77), "plan-row"),
    "planned for a rank that is not there": (wrong_row(rank=3), "plan-row"),
    "an altered plan": (lambda log: altered(log.plans, 2, seed=99), "plan-altered"),
    "two plans of one attempt": (
        lambda log: repeated(
            log.plans, 0, seed=2, plan_id=signed(log.plans[0].record.model_copy(update={"seed": 2})).plan_id
        ),
        "plan-rewritten",
    ),
    "an altered manifest": (lambda log: altered(log.manifests, 0, config="steps: 3"), "manifest-altered"),
    "a manifest that is gone": (altered_manifest_with_its_digest, "manifest-missing"),
    "a step without a result": (lambda log: log.steps.pop(1) and None, "step-without-result"),
    "the last step without a result": (lambda log: log.steps.pop(2) and None, "step-without-result"),
    "two results of a step": (lambda log: repeated(log.steps, 1, adapter_sha256="x"), "two-results"),
    "a result without its plan": (lambda log: log.plans.pop(2) and None, "result-without-plan"),
    "another initial adapter": (lambda log: altered(log.steps, 0, adapter_sha256="x"), "policy-sha"),
    "another adapter published": (lambda log: altered(log.updates, 2, sha256="x"), "policy-sha"),
    "an adapter not published": (lambda log: log.updates.pop(2) and None, "unpublished-step"),
    "a version given twice": (lambda log: repeated(log.updates, 1, sha256="x"), "version-reused"),
    "versions out of order": (lambda log: log.updates.insert(0, log.updates.pop(2)), "version-order"),
    "a version that skips": (lambda log: altered(log.steps, 2, policy_version=9), "version-order"),
    "an adapter that never was": (
        lambda log: altered(log.results, 2, policy_spans=(PolicySpan(start=0, policy="assistant@v77"),)),
        "unknown-sampler",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_rule_finds_what_it_forbids(name: str) -> None:
    mutate, rule = MUTATIONS[name]
    log = consistent()
    mutate(log)
    assert rule in rules(log), rules(log)


def spoken_of_as_a_whole(*, carried: bool = False) -> Log:
    """A task of three samples of which two have results, one of them two; a complaint about all, and its hints."""
    w = Writer()
    task = w.task("whole", 3, Terms(opd=Source.USER))
    results = [w.result(task, 0, [5]), w.result(task, 1, [6]), w.result(task, 1, [7])]
    for result in results[:2]:
        w.hint(result, "Be short.")
    feedback = w.log.feedback[0].record
    w.log.feedback.clear()
    whole = {"feedback_id": "whole", "sample_index": None, "result": results[0] if carried else None}
    w.put(w.log.feedback, topics.FEEDBACK, feedback.model_copy(update=whole))
    for n in range(2):
        altered(w.log.hints, n, feedback_id="whole")
    return w.log


def test_feedback_on_a_whole_task_owes_a_half_to_each_sample_that_has_a_result() -> None:
    log = spoken_of_as_a_whole()
    assert "feedback-unanswered" not in rules(log)
    for n in range(2):
        hint = log.hints.pop(n)
        (found,) = [problem for problem in check(log).problems if problem.rule == "feedback-unanswered"]
        assert found.message.endswith(f"led to no hint of {hint.record.sample.result_id}")
        log.hints.insert(n, hint)
    log.hints.pop(1)
    log.dead.add(log.feedback[0].place)
    assert "feedback-unanswered" not in rules(log)


def test_feedback_on_a_whole_task_that_carries_a_result_owes_a_half_to_that_one() -> None:
    log = spoken_of_as_a_whole(carried=True)
    log.hints.pop(1)
    assert "feedback-unanswered" not in rules(log)
    log.hints.pop(0)
    assert "feedback-unanswered" in rules(log)


def test_a_result_far_from_the_feedback_is_none_that_it_speaks_of() -> None:
    log = spoken_of_as_a_whole()
    log.hints.pop(1)
    apart = log.feedback[0].timestamp - log.results[1].timestamp
    assert log.results[2].timestamp > log.results[1].timestamp
    log.results.pop(2)
    log.feedback_horizon_ms = apart
    assert "feedback-unanswered" in rules(log)
    log.feedback_horizon_ms = apart - 1
    assert "feedback-unanswered" not in rules(log)


def test_a_sample_without_outcome_is_lost_once_the_deadline_has_passed() -> None:
    log = consistent()
    log.outcomes.pop(0)
    log.clock[PARTITION] += Terms().deadline_ms + 1000
    assert "missing-outcome" in rules(log)
    assert {problem.kind for problem in check(log).problems if problem.rule == "missing-outcome"} == {ProblemKind.LOST}


def test_open_tasks_can_be_allowed() -> None:
    log = consistent()
    for seen in [seen for seen in log.outcomes if seen.record.head.task_id == log.tasks[2].record.task_id]:
        log.outcomes.remove(seen)
    log.rollouts.pop(4)
    assert rules(log) == {"open-task"}
    report = check(log, allow_open=True)
    assert report.problems == []
    assert report.numbers["open_tasks"] == 1


@pytest.mark.parametrize(("step", "left"), [(2, set()), (1, {"unpublished-step"})])
def test_only_the_last_step_may_be_about_to_be_published(step: int, left: set[str]) -> None:
    log = consistent()
    log.updates[:] = [seen for seen in log.updates if seen.record.step != step]
    assert "unpublished-step" in rules(log)
    assert {p.rule for p in check(log, allow_open=True).problems} & {"unpublished-step"} == left


def test_a_task_that_was_given_up_with_the_halves_topic_is_not_lost() -> None:
    log = consistent()
    repeated(log.tasks, 4, task_id="given-up")
    task = log.tasks[-1].record
    assert {"missing-open", "open-task"} <= rules(log)
    for index in range(task.n_samples):
        outcome = lost(task, index).model_copy(update={"not_trainable": f"{GIVEN_UP}its topic was deleted"})
        log.outcomes.append(replace(log.outcomes[-1], record=outcome, offset=1_000 + index))
        assert rules(log) == ({"missing-open", "open-task"} if index + 1 < task.n_samples else set())


def test_what_was_dead_lettered_is_accounted_for() -> None:
    log = consistent()
    repeated(log.tasks, 4, task_id="dead", environment="nowhere")
    assert {"missing-open", "open-task"} <= rules(log)
    log.dead.add(log.tasks[-1].place)
    assert rules(log) == {"dead-task"}
    log.undecodable.append(((topics.TASKS, 0, 9), "bad magic"))
    log.dead.add((topics.TASKS, 0, 9))
    assert rules(log) == {"dead-task"}


def test_a_run_whose_tasks_are_all_dead_letters_is_not_without_problems() -> None:
    log = Log(RUN, tasks=consistent().tasks)
    log.dead = {task.place for task in log.tasks}
    report = check(log)
    assert {(problem.kind, problem.rule) for problem in report.problems} == {(ProblemKind.DEAD, "dead-task")}
    assert (report.as_dict()["dead"], report.as_dict()["lost"]) == (5, 0)
    # A replayed record is a second copy, which is not dead.
    repeated(log.tasks, 0)
    assert log.tasks[0].record.task_id not in {
        problem.where for problem in check(log).problems if "dead" in problem.rule
    }


def test_a_forgotten_rollout_is_a_redacted_rollout_and_no_forgery() -> None:
    log = consistent()
    empty = {"token_ids": b"", "loss_mask": b"", "sampler_logprobs": b"", "teacher_logprobs": None, "reward": None}
    repeated(log.rollouts, 0, forgotten=True, **empty)
    assert rules(log) == set()
    log.rollouts.pop(0)
    assert rules(log) == set()


def test_halves_that_somebody_asked_to_forget_owe_nothing() -> None:
    log = consistent()
    log.outcomes.pop(2)
    assert "result-unaccounted" in rules(log)
    forget = Forget(forget_id="f", event_time=1, user_id="user of a")
    log.forgets.append(LoggedRecord(forget, topics.HALVES, PARTITION, 99, 1))
    assert rules(log) == set()


def test_a_step_under_way_is_counted_and_is_no_problem() -> None:
    log = consistent()
    log.steps.pop(2)
    log.updates.pop(2)
    report = check(log)
    assert report.problems == []
    assert report.numbers["steps_under_way"] == 1


def test_a_run_that_goes_on_from_another_must_not_train_its_rollouts_again() -> None:
    log = consistent()
    parent = log.manifests[0].record
    repeated(log.manifests, 0, run_id="run-2", parent_run=RUN, parent_step=1, first_version=4)
    child = log.manifests[-1].record
    altered(log.manifests, -1, digest=record_digest(child, {"digest", "event_time"}))
    plan = signed(
        log.plans[2].record.model_copy(
            update={"run_id": "run-2", "step": 1, "attempt": 1, "manifest_digest": log.manifests[-1].record.digest}
        )
    )
    log.plans.append(LoggedRecord(plan, topics.BATCHES, 0, 100, 1))
    repeated(log.steps, 2, run_id="run-2", step=1, attempt=1, plan_id=plan.plan_id, policy_version=5)
    assert parent.parent_run is None
    problems = check(log).problems
    assert [(p.rule, p.where) for p in problems] == [("trained-twice", plan.rows[0].rollout_id)]


def test_a_branch_begins_with_what_its_parent_gave() -> None:
    log = consistent()
    repeated(log.manifests, 0, run_id="run-2", parent_run=RUN, parent_step=1, first_version=4)
    log.run = "run-2"
    assert ("parent-sha", "run-2/0") in {(p.rule, p.where) for p in check(log).problems}
    given = next(seen.record.adapter_sha256 for seen in log.steps if seen.record.step == 1)
    altered(log.manifests, -1, initial_adapter_sha256=given)
    assert not {"parent-sha", "parent-missing"} & rules(log)
    altered(log.manifests, -1, parent_step=7)
    assert "parent-missing" in rules(log)


def test_the_report_as_json_counts_problems_by_kind() -> None:
    log = consistent()
    trained_twice(log)
    found = check(log).as_dict()
    assert (found["duplicates"], found["lost"], found["wrong"], found["open"]) == (1, 0, 0, 0)
    assert found["problems"][0]["where"] == log.rollouts[0].record.rollout_id
    assert found["run"] == RUN


def test_the_tasks_of_a_branch_are_those_of_what_it_goes_on_from_and_a_counterfactual_has_none() -> None:
    branch = manifest("run.1", first=9).model_copy(update={"parent_run": "run", "parent_step": 5})
    what_if = manifest("run.cf-1").model_copy(update={"parent_run": "run", "policy": "assistant.cf-1"})
    on_the_log = [manifest("run", first=0), branch, what_if]
    assert asked_by("run", on_the_log) == {"run"}
    assert asked_by("run.1", on_the_log) == {"run.1", "run"}
    assert asked_by("nobody's", on_the_log) == {"nobody's"}
    with pytest.raises(UnknownRun, match=r"run\.cf-1 is a counterfactual of run run: .*`tentalis verify run`"):
        asked_by("run.cf-1", on_the_log)


def test_what_nobody_read_was_not_left_out() -> None:
    """`b` began behind where `a` had stopped, and was rolled back to a@1."""

    def at(offset: int) -> tuple[Position, ...]:
        return (Position(topic=topics.ROLLOUTS, partition=0, offset=offset),)

    begun = {"a": (0, 10), "b": (20, 30), "b.1": (30, 40)}
    starts = {run: at(first) for run, (first, _) in begun.items()}
    manifests = {run: manifest(run, first=n).model_copy(update={"start": starts[run]}) for n, run in enumerate(begun)}
    manifests["b.1"] = manifests["b.1"].model_copy(update={"parent_run": "a", "parent_step": 1})
    ends = {run: at(end) for run, (_, end) in begun.items()}
    winners = {run: {1: plan(1, [run], run).model_copy(update={"low_water": ends[run]})} for run in begun}
    training = TrainedRuns("b.1", {run: [made] for run, made in manifests.items()}, {}, {}, winners)
    fates = Fates(training)
    found = {offset: fates.of(rollout(), 0, offset) for offset in (5, 15, 25, 35, 45)}
    assert found == {5: None, 15: "ahead", 25: None, 35: None, 45: "ahead"}
    assert asked_by("b.1", list(manifests.values())) == {"b.1", "a", "b"}


def test_the_plans_are_gone_through_once_however_many_rollouts_there_are() -> None:
    class Counted(SimpleNamespace):
        reads = 0

        @property
        def rows(self) -> tuple[PlanRow, ...]:
            Counted.reads += 1
            return ()

    log = consistent()
    plans: Any = {step: Counted(drops=(), low_water=()) for step in range(1, 4)}
    training = replace(TrainedRuns.of(log), winners={RUN: plans})
    assert len(log.rollouts) > 1 and not list(rollouts_are_used(Index.of(log), training))
    assert Counted.reads == len(plans)
