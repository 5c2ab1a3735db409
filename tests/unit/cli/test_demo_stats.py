"""The numbers of a run, folded from records."""

import random

import pytest

from schemas.records import OutcomeKind, PolicyAck, Record, Status, Task
from tentalis.demo.stats import RunStats
from tests.support.loop_records import (
    RUN,
    T0,
    ack,
    feedback_on,
    lost,
    manifest,
    outcome,
    plan,
    promotion,
    result,
    step_result,
    task,
    update,
)


def two_versions() -> list[tuple[Record, int]]:
    """Two rounds of two tasks with two samples; version 1 earns 0, 1, 0, 0 and version 2 earns 1, 1, 1, 0."""
    rewards = {(1, 0): (0.0, 1.0), (1, 1): (0.0, 0.0), (2, 0): (1.0, 1.0), (2, 1): (1.0, 0.0)}
    log: list[tuple[Record, int]] = [(manifest(), T0), (update(1), T0), (promotion(1), T0), (ack(1), T0)]
    for (version, number), pair in rewards.items():
        of = task(f"t{version}{number}", metadata={"round": str(version - 1)})
        at = T0 + version * 100_000 + number * 1000
        log.append((of, at))
        for index, reward in enumerate(pair):
            answer = result(of, index, version=version)
            log.append((answer, at + 10_000))
            log.append((feedback_on(answer, f"f{version}{number}{index}"), at + 10_500))
            log.append((outcome(of, index, version=version, reward=reward), at + 12_000))
    log += [(plan(1, []), T0 + 120_000), (step_result(1, 2, metrics={"loss": 0.5}), T0 + 140_000)]
    log += [(update(2), T0 + 140_100), (promotion(2), T0 + 140_200), (ack(2), T0 + 140_600)]
    return log


def folded(log: list[tuple[Record, int]]) -> RunStats:
    stats = RunStats(RUN)
    for record, at in log:
        stats.apply(record, at)
    return stats


def test_the_standard_error_of_a_versions_reward_is_over_task_means() -> None:
    one, two = folded(two_versions()).scores()
    assert (one.version, one.mean, one.n) == (1, 0.25, 4)
    assert (two.version, two.mean, two.n) == (2, 0.75, 4)
    # Task means 0.5 and 0: standard deviation sqrt(0.125), over sqrt(2).
    assert one.stderr == pytest.approx(0.25)
    assert (one.mean_words, one.on_topic_share) == (10.0, 1.0)


def test_a_setback_is_a_rollback_since_the_newest_step_was_served() -> None:
    back = [promotion(1, mode="rollback").model_copy(update={"event_time": T0 + at}) for at in (1000, 150_000, 160_000)]
    stats = folded([*two_versions(), *((each, each.event_time) for each in back)])
    assert len(stats.rollbacks) == 3
    assert len(stats.setbacks(T0)) == 2, "the first one was before version 2 was served"
    assert len(stats.setbacks(T0 + 155_000)) == 1 and stats.setbacks(T0 + 160_000) == []
    assert folded([]).setbacks(T0) == []


def test_counts_and_versions() -> None:
    stats = folded(two_versions())
    assert (stats.tasks, stats.samples, stats.results, stats.feedback, stats.tokens) == (4, 8, 8, 8, 24)
    assert dict(stats.outcomes) == {"both": 8}
    assert (stats.first_version, stats.published, stats.promoted, stats.acknowledged) == (1, 2, 2, 2)
    assert stats.metrics == {1: {"loss": 0.5}}


def test_seconds_by_phase() -> None:
    phases = folded(two_versions()).seconds_by_phase()
    assert phases == {
        "sampling": 11.0,
        "judging": 2.0,
        "planning": 7.0,
        "training": 20.0,
        "publishing": 0.1,
        "serving": 0.5,
    }


def test_a_round_that_is_sampled_during_the_trial_of_its_version_is_sampling_from_the_swap_on() -> None:
    swapped = T0 + 205_000
    log = [(each, swapped if isinstance(each, PolicyAck) and each.version == 2 else at) for each, at in two_versions()]
    phases = folded(log)
    assert phases.seconds_by_phase([2])["sampling"] == 6.0
    assert phases.seconds_by_phase([1])["serving"] == 64.9


def test_a_round_for_a_refused_candidate_belongs_to_the_version_that_answered_it() -> None:
    """Version 2 is refused; the round that was issued for it is answered by version 1 and trains the step again."""
    log: list[tuple[Record, int]] = [(manifest(), T0), (update(1), T0), (promotion(1), T0), (ack(1), T0)]
    first, second = (task(f"t{number}", n=1, metadata={"round": str(number)}) for number in (0, 1))
    for of, asked, answered in ((first, 1_000, 11_000), (second, 30_000, 90_000)):
        log += [(of, T0 + asked), (result(of, 0, version=1), T0 + answered)]
        log.append((outcome(of, 0, version=1, reward=1.0), T0 + answered + 1_000))
    log += [(plan(1, []), T0 + 95_000), (step_result(1, 2), T0 + 99_000)]
    phases = folded(log).seconds_by_phase([1])
    assert phases == {"sampling": 89.0, "judging": 1.0, "planning": 4.0, "training": 4.0}


def test_a_long_pause_in_one_step_does_not_change_the_seconds_of_a_phase() -> None:
    log: list[tuple[Record, int]] = [(manifest(), T0)]
    pause = 8 * 3_600_000
    for step, training in enumerate((20_000, pause, 22_000), 1):
        at = T0 + step * 2 * pause
        log += [(plan(step, []), at), (step_result(step, step + 1), at + training)]
    assert folded(log).seconds_by_phase() == {"training": 22.0}


def test_an_outcome_that_is_read_before_its_task_counts_for_the_phases() -> None:
    log = two_versions()
    assert folded(sorted(log, key=lambda pair: isinstance(pair[0], Task))).seconds_by_phase() == (
        folded(log).seconds_by_phase()
    )


def test_the_start_ends_with_the_first_task_or_answer_after_it() -> None:
    stats = folded(two_versions())
    assert stats.start_seconds(T0 + 97_000) == 3.0
    assert stats.start_seconds(T0 + 102_000) == 8.0
    assert stats.start_seconds(T0 + 300_000) is None


def test_repeated_records_and_the_order_of_topics_do_not_change_the_statistics() -> None:
    log = two_versions()
    by_kind: dict[str, list[tuple[Record, int]]] = {}
    for record, at in log:
        topic = "policies" if type(record).__name__ in ("PolicyUpdate", "Promotion") else type(record).__name__
        by_kind.setdefault(topic, []).append((record, at))
    for seed in range(20):
        rng = random.Random(seed)
        kinds = list(by_kind)
        rng.shuffle(kinds)
        stats = folded([pair for kind in kinds for pair in by_kind[kind] for _ in range(rng.choice((1, 2)))])
        expected = folded(log)
        assert stats.scores() == expected.scores()
        assert (stats.tasks, stats.tokens, stats.feedback) == (4, 24, 8)
        assert (stats.published, stats.promoted, stats.acknowledged) == (2, 2, 2)
        assert stats.tokens_per_second() == expected.tokens_per_second()


def test_other_runs_and_policies_do_not_count() -> None:
    stats = folded([(manifest(first=5), T0), (ack(4), T0), (ack(9, policy="other"), T0)])
    foreign = task("x", run_id="another")
    for record in (foreign, result(foreign), outcome(foreign), manifest("another", first=1), plan(1, [], "another")):
        stats.apply(record, T0)
    assert (stats.tasks, stats.results, sum(stats.outcomes.values())) == (0, 0, 0)
    assert stats.acknowledged is None, "version 4 was served before this run began"


def test_the_steps_of_another_run_that_a_branch_begins_with_are_not_the_runs() -> None:
    branch = manifest(f"{RUN}.1", first=7).model_copy(update={"parent_run": "other", "parent_step": 1})
    log = [(manifest("other", first=0), T0), *two_versions(), (branch, T0 + 150_000)]
    stats = folded([*log, (step_result(1, 8, f"{RUN}.1", metrics={"loss": 0.25}), T0 + 160_000)])
    assert (stats.metrics, stats.step_of(7), stats.step_of(8)) == ({1: {"loss": 0.25}}, 0, 1)


def test_what_earned_nothing_knowable_has_no_score() -> None:
    of = task("a", n=4)
    stats = folded([(manifest(), T0), (of, T0)])
    stats.apply(lost(of, 0, OutcomeKind.FAILED), T0)
    stats.apply(lost(of, 1), T0)
    stats.apply(outcome(of, 2, reward=None, kind=OutcomeKind.OPD), T0)
    stats.apply(outcome(of, 2, kind=OutcomeKind.SUPERSEDED, outcome_key="a/2/superseded/r"), T0)
    assert stats.scores() == []
    assert dict(stats.outcomes) == {"failed": 1, "expired": 1, "opd": 1, "superseded": 1}


def test_failed_results_and_refused_versions() -> None:
    of = task("a")
    stats = folded([(manifest(), T0), (of, T0)])
    failed = {"status": Status.FAILED, "error": "e", "response_token_ids": b"", "sampler_logprobs": b""}
    stats.apply(result(of, 0, **failed), T0)
    stats.apply(ack(3, ok=False), T0)
    assert (stats.results, stats.failed_results, stats.refused) == (1, 1, {3: "bad"})
    assert stats.acknowledged is None


def test_tokens_per_second_looks_at_the_last_minute_of_sampling() -> None:
    stats = folded([(manifest(), T0)])
    of = task("a", n=3)
    assert stats.tokens_per_second() == 0.0
    for index, at in enumerate((T0, T0 + 100_000, T0 + 130_000)):
        stats.apply(result(of, index, elapsed_s=10.0), at)
    assert stats.tokens_per_second() == pytest.approx(6 / 40), "the first lies too far back; 90 s to 130 s"
