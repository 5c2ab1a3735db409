"""Lag and offsets of consumer groups without a broker: the arithmetic of plans, refusals and learning units."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import BatchPlan, Position, StepResult
from tentalis.kafka import topology
from tentalis.kafka.groups import ConsumerGroup, GroupMember
from tentalis.kafka.positions import Start
from tentalis.ops.cluster_status import application_status
from tentalis.ops.groups.core import (
    GroupDeletionRefused,
    GroupLag,
    PartitionLag,
    ResetRefused,
    ResetTarget,
    check_deletion,
    check_reset,
    expected_groups,
    is_of_one_worker,
    owner,
    plan_reset,
    reason_against,
    reason_to_keep,
)
from tentalis.ops.groups.learning import (
    WINDOW_MS,
    LearningLag,
    PolicyTraining,
    Stage,
    TrainingLog,
    WaitingRollouts,
    batch_wait,
    learning_lag,
    stages_to_rollout,
)
from tests.support.loop_records import ack, manifest, plan, step_result
from tests.support.trainer_lab import rollout

NOW = 1_000_000_000
MEMBER = GroupMember("tentalis-worker", "10.0.0.7", None, ())


def group(*partitions: PartitionLag, members: tuple[GroupMember, ...] = ()) -> GroupLag:
    return GroupLag(ConsumerGroup("tentalis-join", "stable" if members else "empty", members), "join", partitions)


# --- lag --------------------------------------------------------------------------------------------------------------


def test_lag_counts_what_is_still_on_the_log_and_its_age() -> None:
    read = PartitionLag("t", 0, committed=10, start=0, end=10)
    behind = PartitionLag("t", 1, committed=4, start=6, end=10, oldest_ms=NOW - 3_000)  # retention removed 4 and 5
    never = PartitionLag("t", 2, committed=None, start=2, end=5, oldest_ms=NOW - 1_000)
    lag = group(read, behind, never)
    assert [each.records for each in lag.partitions] == [0, 4, 3]
    assert lag.records == 7
    assert lag.seconds(NOW) == 3.0
    assert group(read).seconds(NOW) == 0.0
    assert (group(never).records, group(never).seconds(NOW)) == (None, None), "a group that never committed has no lag"


def test_the_age_is_unknown_not_zero_where_an_unread_record_has_no_time() -> None:
    timed = PartitionLag("t", 0, committed=4, start=0, end=10, oldest_ms=NOW - 3_000)
    untimed = PartitionLag("t", 1, committed=4, start=0, end=10)
    assert group(untimed).seconds(NOW) is None
    assert group(timed, untimed).seconds(NOW) is None, "the untimed record may be older"
    assert group(timed).seconds(NOW - 60_000) == 0.0, "the broker's clock may be ahead"


def test_every_group_of_the_topology_has_its_application() -> None:
    assert owner("tentalis-join") == topology.named("join")
    assert owner("tentalis-worker-chat") == topology.named("worker")
    assert owner("tentalis-trainer-assistant") == topology.named("trainer")
    assert owner("somebody-else") is None
    assert {owner(name) for name in expected_groups()} == {
        each for each in topology.APPLICATIONS if each.group is not None and each.group_by is None
    }


def test_the_own_group_of_a_worker_is_told_from_that_of_an_environment() -> None:
    names = [
        "tentalis-join",
        "tentalis-trainer-a",
        "tentalis-trainer-a-b",
        "tentalis-worker-chat",
        "tentalis-worker-math",
        "tentalis-worker-math-hard",
    ]
    assert is_of_one_worker("tentalis-worker-chat-5c1f-chat", names)
    assert is_of_one_worker("tentalis-worker-math-hard-5c1f-math-hard", names)
    for name in (
        *names,
        "tentalis-worker-chat-chat",
        "tentalis-worker-chat-my-worker",
        "tentalis-worker-chatter",
        "tentalis-trainer-a-b",
        "tentalis-join-1",
        "somebody-else",
    ):
        assert not is_of_one_worker(name, names), name


def test_the_status_names_a_replaced_worker_and_shows_no_lag_of_it() -> None:
    def of_worker(*members: GroupMember) -> GroupLag:
        state = ConsumerGroup("tentalis-worker-chat-w1", "stable" if members else "empty", members)
        return GroupLag(state, "worker", (PartitionLag("t", 0, committed=1, start=0, end=9),))

    gone = application_status(of_worker(), one_worker=True)
    assert (gone.state, gone.records, gone.in_trouble) == ("replaced", None, False)
    there = application_status(of_worker(MEMBER), one_worker=True)
    assert (there.state, there.records) == ("working", 8)
    assert application_status(of_worker()).state == "no member"


def test_a_group_is_deleted_if_it_is_inactive_and_holds_nothing_that_is_needed() -> None:
    worker, join = topology.named("worker"), topology.named("join")
    check_deletion(group(), reason_to_keep(worker), ())
    check_deletion(group(), reason_to_keep(join), ["tentalis-join"])
    absent = GroupLag(ConsumerGroup("tentalis-join", "absent", ()), "join", ())
    for lag, force, said in (
        (group(members=(MEMBER,)), ["tentalis-join"], r"is active.*tentalis-worker on 10\.0\.0\.7"),
        (group(), ["tentalis-scoring"], "committed offsets of join.*--force tentalis-join"),
        (absent, ["tentalis-join"], "nothing to delete"),
    ):
        with pytest.raises(GroupDeletionRefused, match=said):
            check_deletion(lag, reason_to_keep(join), force)


# --- reset-offsets ----------------------------------------------------------------------------------------------------


@st.composite
def lags(draw: st.DrawFn) -> PartitionLag:
    start = draw(st.integers(0, 50))
    end = draw(st.integers(start, 100))
    return PartitionLag("t", 0, draw(st.none() | st.integers(0, 120)), start, end)


targets = st.one_of(
    st.just(ResetTarget(Start())),
    st.just(ResetTarget(Start(back=0))),
    st.integers(0, 200).map(lambda offset: ResetTarget(Start(offset=offset))),
    st.integers(-200, 200).map(lambda shift: ResetTarget(shift=shift)),
    st.just(ResetTarget(Start(at_ms=1))),
)


@given(lags(), targets, st.none() | st.integers(0, 100))
def test_a_reset_stays_within_the_partition_and_counts_what_it_moves(
    lag: PartitionLag, target: ResetTarget, at_time: int | None
) -> None:
    within = None if at_time is None else min(max(at_time, lag.start), lag.end)
    (row,) = plan_reset(target, [lag], {("t", 0): within})
    assert lag.start <= row.target <= lag.end
    assert row.records == lag.position - row.target
    assert row.changes == (lag.committed != row.target)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (ResetTarget(Start()), 2),
        (ResetTarget(Start(back=0)), 9),
        (ResetTarget(Start(offset=7)), 7),
        (ResetTarget(Start(at_ms=5)), 6),
        (ResetTarget(shift=-1), 4),
        (ResetTarget(shift=3), 8),
    ],
)
def test_each_target_means_its_offset(target: ResetTarget, expected: int) -> None:
    (row,) = plan_reset(target, [PartitionLag("t", 0, committed=5, start=2, end=9)], {("t", 0): 6})
    assert row.target == expected


def test_a_stream_application_with_state_is_refused_with_what_would_happen() -> None:
    join = topology.named("join")
    partitions = [PartitionLag("t", 0, 5, 0, 9), PartitionLag("t", 1, 1, 0, 9)]
    rows = plan_reset(ResetTarget(Start(offset=3)), partitions, {})
    reason = reason_against(join, rows, {"tentalis-join-state-changelog": 4})
    assert "the 2 records that it reads again are recognised by their offsets and skipped" in reason
    assert "the 2 records that it skips are missing from the state for good" in reason
    assert "delete tentalis-join-state-changelog" in reason
    assert reason_against(join, rows, {"tentalis-join-state-changelog": 0}) == "", "without state nothing disagrees"
    unchanged = plan_reset(ResetTarget(shift=0), partitions, {})
    assert reason_against(join, unchanged, {"tentalis-join-state-changelog": 4}) == ""


def test_a_reset_of_the_trainer_is_refused_and_that_of_a_worker_is_not() -> None:
    rows = plan_reset(ResetTarget(Start()), [PartitionLag("t", 0, 5, 0, 9)], {})
    assert "low water of its newest plan" in reason_against(topology.named("trainer"), rows, {})
    assert reason_against(topology.named("worker"), rows, {}) == ""


def test_an_active_group_is_refused_even_with_force() -> None:
    with pytest.raises(ResetRefused, match=r"is active.*tentalis-worker on 10\.0\.0\.7"):
        check_reset(group(members=(MEMBER,)), "", "tentalis-join")


def test_force_must_name_the_group() -> None:
    with pytest.raises(ResetRefused, match="--force tentalis-join"):
        check_reset(group(), "a reason", None)
    with pytest.raises(ResetRefused, match="--force names tentalis-scoring, not tentalis-join"):
        check_reset(group(), "a reason", "tentalis-scoring")
    check_reset(group(), "a reason", "tentalis-join")
    check_reset(group(), "", None)


# --- learning units ---------------------------------------------------------------------------------------------------


def trained(step: int, *, began: int, took: int, rollouts: int = 4, low_water: int = 0) -> tuple[BatchPlan, StepResult]:
    made = plan(step, [f"t{step}/{i}" for i in range(rollouts)]).model_copy(
        update={
            "event_time": began,
            "low_water": (Position(topic="tentalis.rollouts.v1", partition=0, offset=low_water),),
        }
    )
    return made, step_result(step, step + 1, event_time=began + took)


def folded(*records: Any) -> PolicyTraining:
    log = TrainingLog()
    for record in (manifest(), *records):
        log.apply(record)
    assert log.policies == ["assistant"]
    return log.training_of("assistant")


def test_training_is_measured_at_its_newest_steps() -> None:
    one, other = trained(1, began=0, took=2_000, rollouts=4), trained(2, began=5_000, took=4_000, rollouts=6)
    training = folded(*one, *other)
    assert (training.step_s, training.batch_rollouts, training.under_way) == (3.0, 5, False)
    begun, _ = trained(3, began=9_000, took=0, low_water=17)
    training = folded(*one, *other, begun)
    assert training.under_way and training.low_water == {0: 17}
    assert training.newest_rows == [(0, i) for i in range(6)], "rows of the newest plan that was trained"


def test_a_plan_that_another_attempt_replaced_is_not_measured() -> None:
    made, result = trained(1, began=0, took=2_000)
    lost = made.model_copy(update={"attempt": 2, "plan_id": "p1-2"})
    assert [pair[0].plan_id for pair in folded(made, lost, result).recent] == ["p1"]


def test_a_counterfactual_is_no_policy_that_learns() -> None:
    log = TrainingLog()
    log.apply(manifest())
    log.apply(manifest("what-if").model_copy(update={"policy": "what-if", "parent_run": "run-1", "parent_step": 1}))
    assert log.policies == ["assistant"]


def acked(version: int, at: int) -> Any:
    return ack(version).model_copy(update={"event_time": at})


def test_serving_is_measured_from_the_step_to_the_acknowledgement() -> None:
    step = step_result(1, 2, event_time=10_000)
    assert folded(step).serve_s(20_000) == (None, "no server has acknowledged a version of this policy")
    assert folded(step, acked(2, 13_000)).serve_s(20_000) == (3.0, "")
    assert folded(step, acked(2, 13_000), step_result(2, 3, event_time=14_000)).serve_s(20_000) == (6.0, "")
    failed = ack(2, ok=False)
    assert folded(step, failed).serve_s(20_000)[0] is None


def test_versions_that_a_person_promotes_have_no_known_time() -> None:
    by_hand = manifest().model_copy(update={"config": "promotion: manual\n"})
    log = TrainingLog()
    for record in (by_hand, step_result(1, 2, event_time=10_000), acked(2, 13_000)):
        log.apply(record)
    seconds, reason = log.training_of("assistant").serve_s(20_000)
    assert seconds is None and "promotion: manual" in reason


def test_only_what_training_still_needs_waits() -> None:
    counted = WaitingRollouts("tiny", {0: 5}, since_ms=100)
    for policy, offset, at, forgotten in (
        ("tiny", 4, 200, False),  # planned already, but it came within the window
        ("tiny", 5, 50, False),
        ("tiny", 6, 200, False),
        ("tiny", 7, 200, True),
        ("other", 8, 200, False),
    ):
        record = rollout(f"t{offset}", policy=policy).model_copy(update={"forgotten": forgotten})
        counted.add(record, 0, offset, at)
    assert (counted.waiting, counted.arrived) == (2, 2)
    assert counted.per_second == 2 / (WINDOW_MS / 1000)


def test_the_wait_for_a_batch() -> None:
    wait = lambda waiting, rate=1.0, busy=False: batch_wait(waiting, 4, 10.0, rate, under_way=busy)  # noqa: E731
    assert wait(0) == 3.0, "three more must come"
    assert wait(3) == 0.0, "it completes the batch"
    assert wait(3, busy=True) == 10.0
    assert wait(9, rate=0.1) == 20.0, "two full batches are ahead; the two that are missing come meanwhile"
    assert wait(8, rate=0.1) == 30.0
    assert wait(0, rate=0.0) is None
    assert wait(3, rate=0.0) == 0.0


@given(st.integers(0, 500), st.integers(1, 64), st.floats(0.01, 1000), st.floats(0.001, 100), st.booleans())
def test_a_whole_batch_more_ahead_never_shortens_the_wait(
    waiting: int, batch: int, step_s: float, rate: float, under_way: bool
) -> None:
    now = batch_wait(waiting, batch, step_s, rate, under_way=under_way)
    later = batch_wait(waiting + batch, batch, step_s, rate, under_way=under_way)
    assert now is not None and later is not None and 0 <= now <= later


def test_one_unknown_stage_makes_the_minutes_unknown_and_is_named() -> None:
    known = LearningLag("p", 3, (Stage("halves", 30.0), Stage("join", 30.0), Stage("serve", 60.0)))
    assert known.minutes == 2.0 and known.reason == ""
    unknown = LearningLag("p", 3, (*known.stages, Stage("batch", None, "no trainer of p runs")))
    assert unknown.minutes is None and unknown.reason == "no trainer of p runs"


def test_the_stages_before_the_rollout_need_their_applications() -> None:
    ages = {"scoring": 1.0, "hinting": 4.0, "join": 2.0}
    assert stages_to_rollout(ages, [], 3.0) == (Stage("halves", 4.0), Stage("join", 5.0))
    halves, join = stages_to_rollout(ages | {"scoring": None}, ["hinting"], None)
    assert halves.seconds is None and halves.reason == "scoring and hinting do not run"
    assert join.seconds is None and "no trained rollout" in join.reason


def test_the_whole_way_of_a_complaint() -> None:
    made, result = trained(1, began=0, took=6_000, rollouts=2, low_water=0)
    training = folded(made, result, acked(2, 10_000))
    waiting = WaitingRollouts("assistant", {0: 0}, since_ms=0, waiting=3, arrived=600)
    before = stages_to_rollout({"scoring": 0.0, "hinting": 0.0, "join": 0.0}, [], 2.0)
    lag = learning_lag(training, waiting, before, 20_000, trainer_active=True)
    # join 2 s, one full batch ahead 6 s (the new one completes the second), the step 6 s, serving 4 s.
    assert [stage.seconds for stage in lag.stages] == [0.0, 2.0, 6.0, 6.0, 4.0]
    assert lag.minutes == 18 / 60
    alone = learning_lag(training, waiting, before, 20_000, trainer_active=False)
    assert alone.minutes is None and alone.reason == "no trainer of assistant runs"
