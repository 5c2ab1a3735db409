"""The planner: the same offers in any order of arrival make the same plans."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import topics
from schemas.records import BatchPlan
from tentalis.ops.forget.core import redacted_rollout
from tests.support.trainer_lab import rollout
from trainer.data import plan as plan_module
from trainer.data.candidates import Offer, ReadSegment, offer_of
from trainer.data.plan import (
    GRADED_TOO_LATE,
    SUPERSEDED,
    UNPUBLISHED,
    BatchPlanner,
    LostOffers,
    PlanContext,
    lay_out,
    next_attempt,
    plan_of,
    rewarded_samples,
    step_seed,
)
from trainer.data.rollout_reader import RolloutReader

CONTEXT = PlanContext("run", "tiny", "m", 1, 100, 5, "owner")


def offer(partition: int, offset: int, time: int, key: str = "", **more: object) -> Offer:
    key = key or f"p{partition}o{offset}/0"
    base = Offer(key, key.split("/")[0], f"d-{key}", partition, offset, time, 10, True, False, 0, 0, None)
    return replace(base, **more)


def planner(partitions: int, batch: int = 3, staleness: int = 100) -> BatchPlanner:
    return BatchPlanner(batch, staleness, {}, dict.fromkeys(range(partitions), 0))


def segment(partition: int, start: int, offers: Sequence[Offer], end: int | None = None) -> ReadSegment:
    return ReadSegment(partition, start, end if end is not None else start + len(offers), tuple(offers))


def drain(batch_planner: BatchPlanner, ends: dict[int, int], version: int = 0) -> list[BatchPlan]:
    plans = []
    while (draft := batch_planner.next_draft(version, ends)) is not None:
        plan = plan_of(draft, CONTEXT, len(plans) + 1, 1, 0)
        batch_planner.consume(plan.rows, draft.low_water)
        plans.append(plan)
    return plans


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[list[Offer]], list[ReadSegment], list[int]]:
    """Partitions full of offers (some unfit, stale or doubled), their segments in an order of arrival that keeps each
    partition's own, and after how many segments to plan."""
    logs: list[list[Offer]] = []
    segments: list[list[ReadSegment]] = []
    for partition in range(draw(st.integers(1, 3))):
        log: list[Offer] = []
        for offset in range(draw(st.integers(0, 12))):
            made = offer(partition, offset, draw(st.integers(0, 20)))
            kind = draw(st.sampled_from(["fit", "fit", "fit", "unfit", "stale", "twice", "forged"]))
            if kind == "unfit":
                made = replace(made, unfit="greedy sampling")
            if kind == "stale":
                made = replace(made, oldest_version=-1000)
            if kind in ("twice", "forged"):
                made = replace(made, key="double/0", task_id="double", digest="d" if kind == "twice" else f"d{offset}")
            log.append(made)
        cuts = sorted(draw(st.sets(st.integers(0, len(log)), max_size=4)) | {0, len(log)})
        segments.append([segment(partition, a, log[a:b]) for a, b in pairwise(cuts)])
        logs.append(log)
    arrived: list[ReadSegment] = []
    waiting = [list(part) for part in segments]
    while any(waiting):
        part = draw(st.sampled_from([part for part in waiting if part]))
        arrived.append(part.pop(0))
    pauses = draw(st.lists(st.integers(0, len(arrived)), max_size=4))
    return logs, arrived, pauses


@settings(max_examples=200, deadline=None)
@given(arrivals())
def test_any_interleaving_of_arrivals_makes_the_same_plans(
    case: tuple[list[list[Offer]], list[ReadSegment], list[int]],
) -> None:
    logs, arrived, pauses = case
    ends = {partition: len(log) for partition, log in enumerate(logs)}
    at_once = planner(len(logs))
    for log in logs:
        if log:
            at_once.add_segment(segment(log[0].partition, 0, log))
    expected = drain(at_once, ends)
    piecewise = planner(len(logs))
    plans: list[BatchPlan] = []
    for number, part in enumerate(arrived):
        if number in pauses:
            for plan in drain(piecewise, ends):
                plans.append(plan)
        piecewise.add_segment(part)
        assert piecewise.has_batch(0) == (piecewise.count_usable(0)[0] == piecewise.batch_rollouts)
    plans += drain(piecewise, ends)
    strip = [(plan.rows, plan.drops, plan.low_water) for plan in plans]
    assert strip == [(plan.rows, plan.drops, plan.low_water) for plan in expected]
    keys = [row.rollout_id for plan in plans for row in plan.rows]
    assert len(keys) == len(set(keys))


def test_no_batch_while_a_partition_may_still_hold_an_earlier_rollout() -> None:
    batch_planner = planner(2, batch=2)
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 5), offer(0, 1, 6)]))
    assert batch_planner.has_batch(0)
    assert batch_planner.next_draft(0, {0: 2, 1: 1}) is None
    batch_planner.add_segment(segment(1, 0, [offer(1, 0, 1)]))
    draft = batch_planner.next_draft(0, {0: 2, 1: 1})
    assert draft is not None
    assert [row.key for row in draft.offers] == ["p1o0/0", "p0o0/0"]
    assert draft.low_water == {0: 1, 1: 1}


def test_a_partition_at_its_end_holds_nothing_up() -> None:
    batch_planner = planner(2, batch=1)
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 5)]))
    assert batch_planner.next_draft(0, {0: 1, 1: 0}) is not None


def test_the_clock_of_a_partition_never_steps_back() -> None:
    batch_planner = planner(1, batch=2)
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 9), offer(0, 1, 3)]))
    draft = batch_planner.next_draft(0, {0: 2})
    assert draft is not None and [row.offset for row in draft.offers] == [0, 1]


def test_drops_are_ranges_with_reason_and_count() -> None:
    batch_planner = planner(1, batch=2, staleness=1)
    log = [
        offer(0, 0, 0, oldest_version=0),
        offer(0, 3, 0, oldest_version=1),
        offer(0, 4, 0, unfit="greedy sampling", oldest_version=3),
        offer(0, 5, 0, key="a/0", oldest_version=3),
        offer(0, 6, 0, key="a/0", oldest_version=3),
        offer(0, 7, 0, key="a/0", digest="other", oldest_version=3),
        offer(0, 8, 0, oldest_version=2),
        offer(0, 9, 0, oldest_version=2),
    ]
    batch_planner.add_segment(segment(0, 0, log, end=10))
    assert batch_planner.count_usable(3) == (2, {"stale": 2, "greedy sampling": 1, "duplicate": 1, "forged": 1})
    draft = batch_planner.next_draft(3, {0: 10})
    assert draft is not None
    assert [row.offset for row in draft.offers] == [5, 8]
    assert [(d.first_offset, d.last_offset, d.count, d.reason) for d in draft.drops] == [
        (0, 3, 2, "stale"),
        (4, 4, 1, "greedy sampling"),
        (6, 6, 1, "duplicate"),
        (7, 7, 1, "forged"),
    ]
    assert draft.forged == ("a/0",)
    assert draft.low_water == {0: 9}


def test_reasons_that_alternate_do_not_make_a_plan_too_large_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any client can send rollouts that cannot be trained on, now for one reason, now for the other."""
    monkeypatch.setattr(plan_module, "MAX_DROPS", 10)
    drops = []
    for count in (10, 11):
        batch_planner = planner(1, batch=1)
        unfit = [offer(0, i, 0, unfit=("greedy sampling", "over 6 tokens")[i % 2]) for i in range(count)]
        batch_planner.add_segment(segment(0, 0, [*unfit, offer(0, count, 1)]))
        draft = batch_planner.next_draft(0, {0: count + 1})
        assert draft is not None
        drops.append(draft.drops)
    assert [(d.first_offset, d.count) for d in drops[0]] == [(i, 1) for i in range(10)]
    assert [(d.first_offset, d.last_offset, d.count, d.reason) for d in drops[1]] == [
        (0, 10, 6, "greedy sampling"),
        (1, 9, 5, "over 6 tokens"),
    ]


def test_a_version_that_was_not_published_samples_nothing_that_is_trained_on() -> None:
    """A negative distance passed the staleness limit. The trained version itself may not be published yet."""
    batch_planner = planner(1, batch=2)
    log = [
        offer(0, 0, 0, oldest_version=5, newest_version=5),
        offer(0, 1, 0, oldest_version=6, newest_version=6),
        offer(0, 2, 0, oldest_version=5, newest_version=999),
        offer(0, 3, 0, oldest_version=4, newest_version=5),
    ]
    batch_planner.add_segment(segment(0, 0, log))
    assert not batch_planner.has_batch(4) and batch_planner.count_full_batches(5) == 1
    draft = batch_planner.next_draft(5, {0: 4})
    assert draft is not None and [row.offset for row in draft.offers] == [0, 3]
    assert [(d.first_offset, d.count, d.reason) for d in draft.drops] == [(1, 2, UNPUBLISHED)]


def test_what_the_lineage_consumed_is_not_trained_again() -> None:
    batch_planner = BatchPlanner(1, 100, {"a/0": "d-a/0"}, {0: 5})
    batch_planner.add_segment(
        segment(0, 3, [offer(0, 4, 0, key="b/0"), offer(0, 5, 0, key="a/0"), offer(0, 6, 0, key="c/0")], end=7)
    )
    draft = batch_planner.next_draft(0, {0: 7})
    assert draft is not None
    # Offset 4 lies below what was considered before, and a/0 was in a plan.
    assert [row.key for row in draft.offers] == ["c/0"]
    assert [drop.reason for drop in draft.drops] == ["duplicate"]


def test_a_reader_may_begin_behind_a_plan_that_was_executed_before_any_offer() -> None:
    first, resumed = planner(1, batch=2), planner(1, batch=2)
    first.add_segment(segment(0, 0, [offer(0, 0, 5), offer(0, 1, 6)]))
    (executed,) = drain(first, {0: 2})
    resumed.consume(executed.rows, {0: 2})
    resumed.add_segment(segment(0, 2, [offer(0, 2, 7), offer(0, 3, 8)]))
    draft = resumed.next_draft(0, {0: 4})
    assert draft is not None
    assert [row.offset for row in draft.offers] == [2, 3]


def test_a_gap_between_offers_is_an_error() -> None:
    batch_planner = planner(1)
    batch_planner.add_segment(segment(0, 0, [], end=5))
    batch_planner.add_segment(segment(0, 2, [], end=4))
    with pytest.raises(LostOffers, match="partition 0 was offered from offset 6, but the last offer ended at 5"):
        batch_planner.add_segment(segment(0, 6, [], end=7))


def rows_of(sizes: Sequence[int]) -> BatchPlan:
    batch_planner = planner(1, batch=len(sizes))
    batch_planner.add_segment(
        segment(0, 0, [offer(0, i, 0, key=f"g{i // 4}/{i % 4}", n_tokens=n) for i, n in enumerate(sizes)])
    )
    draft = batch_planner.next_draft(0, {0: len(sizes)})
    assert draft is not None
    return plan_of(draft, CONTEXT, 1, 1, 0)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=24), st.integers(1, 4))
def test_every_row_has_one_place_and_no_micro_batch_is_too_large(sizes: list[int], ranks: int) -> None:
    rows = rows_of(sizes).rows
    laid = lay_out(rows, [row.rollout_id.split("/")[0] for row in rows], ranks, 100)
    assert [row.rollout_id for row in laid] == [row.rollout_id for row in rows]
    filled: dict[tuple[int, int], list[int]] = {}
    for row in laid:
        filled.setdefault((row.rank, row.micro_batch), []).append(row.n_tokens)
    assert all(sum(tokens) <= 100 or len(tokens) == 1 for tokens in filled.values())
    assert all(row.rank < ranks for row in laid)


def test_groups_stay_together_and_ranks_are_balanced() -> None:
    rows = rows_of([10] * 16).rows
    laid = lay_out(rows, [row.rollout_id.split("/")[0] for row in rows], 2, 80)
    for group in range(4):
        assert len({(row.rank, row.micro_batch) for row in laid if row.rollout_id.startswith(f"g{group}/")}) == 1
    assert sum(row.n_tokens for row in laid if row.rank == 0) == 80


def test_ranks_are_balanced_by_cost_and_not_by_tokens_alone() -> None:
    """By tokens one rank would get the long rollout and two short ones, 5,000 each; its attention is worth more."""
    rows = rows_of([4000] + [500] * 12).rows
    laid = lay_out(rows, [row.rollout_id for row in rows], 2, 8000)
    assert [row.n_tokens for row in laid if row.rank == laid[0].rank] == [4000]


def test_another_world_makes_another_attempt_of_the_same_rollouts() -> None:
    plan = rows_of([10] * 8)
    again = next_attempt(plan, replace(CONTEXT, world_size=2, manifest_digest="m2", owner="other"), 7, {})
    assert (again.attempt, again.world_size, again.manifest_digest, again.owner) == (2, 2, "m2", "other")
    assert [row.rollout_id for row in again.rows] == [row.rollout_id for row in plan.rows]
    assert {row.rank for row in again.rows} == {0, 1}
    assert again.plan_id != plan.plan_id


def test_a_plan_is_identified_by_what_it_says_and_not_by_who_wrote_it_when() -> None:
    plan = rows_of([10] * 8)
    assert rows_of([10] * 8).plan_id == plan.plan_id
    assert rows_of([10] * 7).plan_id != plan.plan_id
    assert plan.seed == step_seed(CONTEXT.seed, 1) != step_seed(CONTEXT.seed, 2)


def test_a_redacted_rollout_counts_as_soon_as_it_is_known() -> None:
    batch_planner = planner(1, batch=2)
    gone = offer(0, 0, 1, "gone/0")
    redacted_rollout = replace(gone, offset=3, append_time=4, n_tokens=0, unfit="forgotten")
    batch_planner.add_segment(segment(0, 0, [gone, offer(0, 1, 2), offer(0, 2, 3), redacted_rollout, offer(0, 4, 5)]))
    (plan,) = drain(batch_planner, {0: 5})
    assert [row.rollout_id for row in plan.rows] == ["p0o1/0", "p0o2/0"]
    assert [(drop.first_offset, drop.reason) for drop in plan.drops] == [(0, "forgotten")]
    # Written once more behind its redacted rollout, by a worker that was killed.
    batch_planner.add_segment(segment(0, 5, [replace(gone, offset=5, append_time=6), offer(0, 6, 7)]))
    (plan,) = drain(batch_planner, {0: 7})
    assert [row.rollout_id for row in plan.rows] == ["p0o4/0", "p0o6/0"]


def test_a_redacted_rollout_of_what_was_trained_is_a_duplicate() -> None:
    batch_planner = planner(1, batch=1)
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 1, "a/0")]))
    drain(batch_planner, {0: 1})
    redacted_rollout = replace(offer(0, 1, 2, "a/0"), unfit="forgotten")
    batch_planner.add_segment(segment(0, 1, [redacted_rollout, offer(0, 2, 3)]))
    (plan,) = drain(batch_planner, {0: 3})
    assert [(drop.first_offset, drop.reason) for drop in plan.drops] == [(1, "duplicate")]


def grade_key(number: int, sample: str = "a/0") -> str:
    return f"{sample}/grade/00000000-0000-5000-8000-{number:012}"


def rows(plan: BatchPlan) -> list[tuple[str, bool, bool]]:
    return [(row.rollout_id, row.rl, row.opd) for row in plan.rows]


def late_grade(partition: int, offset: int, time: int, number: int) -> Offer:
    return offer(partition, offset, time, grade_key(number), supersedes="a/0")


def test_a_late_grade_replaces_the_reward_that_was_not_trained_yet() -> None:
    """It counts as soon as it is known, like an erasure; of several the newest. A hint still trains."""
    for hinted in (False, True):
        batch_planner = planner(2, batch=3 if hinted else 2)
        batch_planner.add_segment(segment(0, 0, [offer(0, 0, 0, "a/0", opd=hinted), offer(0, 1, 1)]))
        batch_planner.add_segment(segment(1, 0, [late_grade(1, 0, 5, 1), late_grade(1, 1, 9, 2)]))
        assert batch_planner.count_full_batches(0) == 1
        (plan,) = drain(batch_planner, {0: 2, 1: 2})
        own = [("a/0", False, True)] if hinted else []
        assert rows(plan) == [*own, ("p0o1/0", True, False), (grade_key(2), True, False)]
        dropped = {(drop.partition, drop.first_offset) for drop in plan.drops if drop.reason == SUPERSEDED}
        assert dropped == ({(1, 0)} if hinted else {(0, 0), (1, 0)})


def test_a_grade_after_the_reward_was_trained_is_dropped_and_says_so() -> None:
    first = planner(1, batch=1)
    first.add_segment(segment(0, 0, [offer(0, 0, 0, "a/0")]))
    (trained,) = drain(first, {0: 1})
    restarted = BatchPlanner(
        1, 100, {row.rollout_id: row.digest for row in trained.rows}, {0: 1}, rewarded=rewarded_samples([trained])
    )
    for each in (first, restarted):
        each.add_segment(segment(0, 1, [late_grade(0, 1, 5, 1), offer(0, 2, 6)]))
        (plan,) = drain(each, {0: 3})
        assert [row.offset for row in plan.rows] == [2]
        assert [(drop.first_offset, drop.reason) for drop in plan.drops] == [(1, GRADED_TOO_LATE)]


def test_the_reward_of_a_sample_trains_once_whichever_of_its_rollouts_is_read_first() -> None:
    """A restart between the steps knows it from the plans. A hint alone that trained is no reward."""
    grade_first = BatchPlanner(1, 100, {grade_key(1): "d"}, {0: 0}, rewarded={"a/0"})
    grade_first.add_segment(segment(0, 0, [offer(0, 0, 0, "a/0"), late_grade(0, 1, 5, 2), offer(0, 2, 6)]))
    (plan,) = drain(grade_first, {0: 3})
    assert [row.offset for row in plan.rows] == [2]
    hint_first = BatchPlanner(1, 100, {"a/0": "d-a/0"}, {0: 1})
    hint_first.add_segment(segment(0, 1, [late_grade(0, 1, 5, 1)]))
    assert [rows(plan) for plan in drain(hint_first, {0: 2})] == [[(grade_key(1), True, False)]]


def test_a_grade_that_was_dropped_from_its_plan_leaves_its_reward_untrained() -> None:
    batch_planner = planner(1, batch=1)
    batch_planner.add_segment(segment(0, 0, [late_grade(0, 0, 0, 1), late_grade(0, 1, 1, 2)]))
    (plan,) = drain(batch_planner, {0: 2})
    assert rows(plan) == [(grade_key(2), True, False)] and batch_planner.rewarded == {"a/0"}
    batch_planner.release([grade_key(2)])
    assert not batch_planner.rewarded and not batch_planner.consumed


def test_a_rollout_of_a_grade_says_whose_reward_it_replaces() -> None:
    assert offer_of(rollout("a", 0, rollout_id=grade_key(1)), 0, 0, 0, 100).supersedes == "a/0"
    assert offer_of(rollout("a", 0), 0, 0, 0, 100).supersedes is None


def test_another_attempt_leaves_out_what_was_forgotten() -> None:
    batch_planner = planner(1, batch=3)
    batch_planner.add_segment(segment(0, 0, [offer(0, i, i) for i in range(3)]))
    (plan,) = drain(batch_planner, {0: 3})
    again = next_attempt(plan, CONTEXT, 7, {"p0o1/0": redacted_rollout(rollout("p0o1"))})
    assert [row.rollout_id for row in again.rows] == ["p0o0/0", "p0o2/0"]
    assert [(drop.first_offset, drop.count, drop.reason) for drop in again.drops] == [(1, 1, "forgotten")]
    assert (again.attempt, again.low_water) == (2, plan.low_water) and again.plan_id != plan.plan_id
    assert next_attempt(plan, CONTEXT, 7, {row.rollout_id: redacted_rollout(rollout()) for row in plan.rows}).rows == ()


def test_another_attempt_keeps_the_groups_whatever_the_ids_look_like() -> None:
    """Ids with slashes, and the extra rollout of a late hint, which is of its task's group too."""
    laid = [rollout(f"chat/{task}", index) for task in "ab" for index in (0, 1)]
    laid.append(rollout("chat/b", 1, rollout_id="chat/b/1/opd/event/7"))
    batch_planner = planner(1, batch=5)
    batch_planner.add_segment(segment(0, 0, [offer_of(each, 0, at, at, 100) for at, each in enumerate(laid)]))
    draft, context = batch_planner.next_draft(0, {0: 5}), replace(CONTEXT, whole_groups=True, micro_batch_tokens=21)
    assert draft is not None
    plan = plan_of(draft, context, 1, 1, 0)
    assert [row.micro_batch for row in plan.rows] == [1, 1, 0, 0, 0]
    assert next_attempt(plan, context, 7, {each.rollout_id: each for each in laid}).rows == plan.rows


def test_a_batch_closes_by_count_or_by_tokens_whichever_comes_first() -> None:
    offers = [offer(0, i, i, n_tokens=tokens) for i, tokens in enumerate([10, 10, 30, 5, 5, 5, 5])]
    batch_planner = BatchPlanner(4, 100, {}, {0: 0}, batch_tokens=25)
    batch_planner.add_segment(segment(0, 0, offers))
    assert batch_planner.count_full_batches(0) == 2
    assert [[row.n_tokens for row in plan.rows] for plan in drain(batch_planner, {0: 7})] == [
        [10, 10, 30],
        [5, 5, 5, 5],
    ]


def test_only_what_a_step_would_take_counts_as_waiting() -> None:
    offers = [offer(0, 0, 0), offer(0, 1, 1, unfit="greedy sampling"), offer(0, 2, 2, key="p0o0/0"), offer(0, 3, 3)]
    batch_planner = BatchPlanner(1, 2, {}, {0: 0})
    batch_planner.add_segment(segment(0, 0, offers))
    assert batch_planner.count_full_batches(2) == 2
    assert batch_planner.count_full_batches(3) == 0, "too old for it"
    assert batch_planner.caught_up({0: 4}) and not batch_planner.caught_up({0: 5})


def test_a_heap_of_what_cannot_be_trained_on_is_not_put_in_order_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_planner = planner(2, batch=2)
    for partition in (0, 1):
        batch_planner.add_segment(
            segment(partition, 0, [offer(partition, i, i, unfit="equal rewards") for i in range(50)])
        )
    monkeypatch.setattr("trainer.data.plan.heapq.merge", lambda *_, **__: pytest.fail("merged"))
    assert not batch_planner.has_batch(0)
    batch_planner.add_segment(segment(0, 50, [offer(0, 50, 50), offer(0, 51, 51)]))
    assert batch_planner.has_batch(0)


def test_staleness_is_what_the_lineage_says() -> None:
    batch_planner = BatchPlanner(
        1, 2, {}, {0: 0}, staleness=lambda context, sampled: 0 if sampled == 5 else context - sampled
    )
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 0, oldest_version=5), offer(0, 1, 1, oldest_version=6)]))
    (plan,) = drain(batch_planner, {0: 2}, version=9)
    assert [row.offset for row in plan.rows] == [0]
    assert batch_planner.count_full_batches(9) == 0


def test_a_partition_that_was_added_is_read_from_its_beginning() -> None:
    """Neither the manifest's start nor the checkpoint of a run knows it."""
    batch_planner = planner(1, batch=2)
    batch_planner.add_segment(segment(0, 0, [offer(0, 0, 1)]))
    batch_planner.add_segment(segment(1, 0, [offer(1, 0, 2)]))
    (plan,) = drain(batch_planner, {0: 1, 1: 1})
    assert [(row.partition, row.offset) for row in plan.rows] == [(0, 0), (1, 0)]
    restarted = planner(1, batch=2)
    restarted.consume([], {0: 1, 1: 1})
    assert restarted.low_water == {0: 1, 1: 1} and restarted.pending == 0


def test_a_rank_reads_a_partition_that_was_added_from_its_beginning() -> None:
    """Its positions are those of the checkpoint, which knows the partitions of its time."""
    assigned: list[TopicPartition] = []
    reader: Any = SimpleNamespace(
        _low_water={0: 7}, _letters=SimpleNamespace(forget=lambda: None), _paused=False, _next_offsets={}
    )
    consumer: Any = SimpleNamespace(assign=assigned.extend)
    RolloutReader._on_assign(reader, consumer, [TopicPartition(topics.ROLLOUTS, p) for p in (0, 1)])
    assert [(p.partition, p.offset) for p in assigned] == [(0, 7), (1, 0)]
    assert reader._next_offsets == reader._low_water == {0: 7, 1: 0}
