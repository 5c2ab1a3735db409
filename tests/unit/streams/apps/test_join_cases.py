"""The table of cases: each row of docs/concepts/join.md, one test."""

import pytest

from schemas import topics
from schemas.digest import digest_holds
from schemas.ids import derived_id, graded_sample, rollout_task_id
from schemas.records import (
    EXPLICIT,
    HintKind,
    Opens,
    Outcome,
    OutcomeKind,
    Record,
    Sample,
    Score,
    Source,
    Status,
    TaskHead,
)
from schemas.tensors import float32_bytes, float32_view, int32_bytes
from tentalis.kafka.partitioner import partition_of
from tests.support.join_support import (
    LIMITS,
    PARTITION,
    START,
    drive,
    fold,
    forget,
    head,
    hint,
    open_,
    record_at,
    sample,
    score,
    tick,
    worker,
)

NONE, REJECTED = HintKind.NONE, HintKind.REJECTED


def kinds(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {key: outcome.kind.value for key, outcome in outcomes.items()}


@pytest.mark.parametrize("first", ["score", "hint"])
def test_both_halves_in_either_order_make_one_rollout(first: str) -> None:
    s = sample(head())
    halves = [(20, score(s, 0.5)), (30, hint(s))]
    if first == "hint":
        halves = [(20, hint(s)), (30, score(s, 0.5))]
    written = fold((10, open_(head())), *halves)
    assert kinds(written.outcomes) == {"t1/0": "both"}
    rollout, outcome = written.rollouts["t1/0"], written.outcomes["t1/0"]
    assert (rollout.reward, rollout.has_rl, rollout.has_opd, rollout.hints) == (0.5, True, True, ("Be brief.",))
    assert rollout.token_ids == s.token_ids and rollout.sampler_logprobs == s.sampler_logprobs
    assert rollout.teacher_logprobs is not None and float32_view(rollout.teacher_logprobs).tolist() == [-0.25] * 4
    assert (rollout.event_time, outcome.event_time) == (START + 30, START + 30)
    assert digest_holds(rollout) and outcome.rollout_digest == rollout.digest and outcome.rollout_id == "t1/0"
    assert [(p.half, p.offset, p.partition) for p in rollout.provenance] == [
        ("score", 1 if first == "score" else 2, 3),
        ("hint", 2 if first == "score" else 1, 3),
    ]


def test_likeliest_tokens_and_the_number_of_rewards_come_through() -> None:
    task = head(n=3, opd=None)
    samples = [sample(task, index, f"r{index}") for index in range(3)]
    scores = [score(s, reward) for s, reward in zip(samples, (0.5, 1.0, None), strict=True)]
    written = fold((10, open_(task)), *((20, each) for each in scores))
    assert {key: (r.n_closed, r.n_rewarded) for key, r in written.rollouts.items()} == {"t1/0": (3, 2), "t1/1": (3, 2)}
    assert all(digest_holds(rollout) for rollout in written.rollouts.values())

    s = sample(head())
    listed = {"topk": 2, "topk_ids": int32_bytes(range(8)), "topk_logprobs": float32_bytes([-1.0] * 8)}
    rollout = fold((10, open_(head())), (20, score(s)), (30, hint(s).model_copy(update=listed))).rollouts["t1/0"]
    assert {name: getattr(rollout, name) for name in listed} == listed
    assert rollout.n_rewarded is None and digest_holds(rollout)
    assert not digest_holds(rollout.model_copy(update={"topk_ids": int32_bytes([9] * 8)}))


def test_a_half_opens_its_task_without_an_open() -> None:
    s = sample(head())
    assert kinds(fold((20, hint(s)), (30, score(s))).outcomes) == {"t1/0": "both"}


def test_only_a_score_is_awaited_and_closes_the_slot_at_once() -> None:
    written = fold((20, score(sample(head(opd=None)))))
    assert kinds(written.outcomes) == {"t1/0": "rl"}
    assert not written.rollouts["t1/0"].has_opd and written.rollouts["t1/0"].teacher_logprobs is None


def test_only_a_hint_is_awaited_and_closes_the_slot_at_once() -> None:
    written = fold((20, hint(sample(head(rl=None)))))
    assert kinds(written.outcomes) == {"t1/0": "opd"}
    rollout = written.rollouts["t1/0"]
    assert (rollout.reward, rollout.has_rl, rollout.has_opd, rollout.group_mean, rollout.n_closed) == (
        None,
        False,
        True,
        None,
        1,
    )


@pytest.mark.parametrize("kind", [NONE, REJECTED])
def test_a_hint_that_says_nothing_closes_its_half(kind: HintKind) -> None:
    s = sample(head())
    written = fold((20, hint(s, kind)), (30, score(s)))
    assert kinds(written.outcomes) == {"t1/0": "rl"}
    assert written.rollouts["t1/0"].token_ids == s.token_ids, "the tokens come from the half that has them"
    assert written.rollouts["t1/0"].hints == ()


def test_an_unknown_score_with_a_hint_trains_on_the_hint() -> None:
    s = sample(head())
    written = fold((20, score(s, None)), (30, hint(s)))
    assert kinds(written.outcomes) == {"t1/0": "opd"}
    assert written.rollouts["t1/0"].reward is None and not written.rollouts["t1/0"].has_rl


def test_an_unknown_score_and_no_hint_is_empty_without_a_rollout() -> None:
    s = sample(head())
    written = fold((20, score(s, None)), (30, hint(s, NONE)))
    assert kinds(written.outcomes) == {"t1/0": "empty"} and not written.rollouts
    assert written.outcomes["t1/0"].result_id == s.result_id


def test_a_missing_hint_is_given_up_after_its_window() -> None:
    written = fold((20, score(sample(head()))), (120, tick()), (121, tick()))
    assert kinds(written.outcomes) == {"t1/0": "rl"}
    assert written.outcomes["t1/0"].event_time == START + 121


def test_a_hint_at_the_very_end_of_its_window_is_in_time() -> None:
    s = sample(head())
    assert kinds(fold((20, score(s)), (120, hint(s))).outcomes) == {"t1/0": "both"}


def test_the_window_never_reaches_past_the_deadline() -> None:
    s = sample(head(deadline_ms=100))
    written = fold((20, score(s)), (101, hint(s)))
    assert kinds(written.outcomes) == {"t1/0": "rl", f"t1/0/late/{hint(s).hint_id}": "late"}


def test_a_missing_score_is_given_up_only_at_the_deadline() -> None:
    s = sample(head())
    written = fold((0, hint(s)), (1000, tick()))
    assert not written.outcomes
    written = fold((0, hint(s)), (1000, tick()), (1001, tick()))
    assert kinds(written.outcomes) == {"t1/0": "opd"}


def test_a_score_at_the_deadline_is_in_time_and_one_after_it_is_counted_but_not_trained() -> None:
    s = sample(head(opd=None))
    assert kinds(fold((0, open_(head(opd=None))), (1000, score(s))).outcomes) == {"t1/0": "rl"}
    written = fold((0, open_(head(opd=None))), (1001, score(s, 0.25)))
    late = f"t1/0/late/{score(s).score_id}"
    assert kinds(written.outcomes) == {"t1/0": "expired", late: "late"} and not written.rollouts
    assert written.outcomes[late].reward == 0.25 and not written.outcomes[late].has_rl
    assert written.outcomes[late].half_id == score(s).score_id


def test_a_task_without_either_half_expires_at_its_deadline() -> None:
    written = fold((0, open_(head(n=2))), (1001, tick()))
    assert kinds(written.outcomes) == {"t1/0": "expired", "t1/1": "expired"} and not written.rollouts
    assert written.outcomes["t1/0"].event_time == START + 1001 and written.outcomes["t1/0"].result_id is None


def test_a_task_announced_after_its_deadline_expires_at_once_and_its_half_is_late() -> None:
    s = sample(head(opd=None))
    written = fold((1001, score(s)))
    assert kinds(written.outcomes) == {"t1/0": "expired", f"t1/0/late/{score(s).score_id}": "late"}


def test_a_late_hint_becomes_a_rollout_of_its_own() -> None:
    s = sample(head())
    written = fold((0, score(s)), (101, tick()), (200, hint(s)))
    late, opd = f"t1/0/late/{hint(s).hint_id}", f"t1/0/opd/{hint(s).hint_id}"
    assert kinds(written.outcomes) == {"t1/0": "rl", late: "late"}
    assert set(written.rollouts) == {"t1/0", opd}
    rollout = written.rollouts[opd]
    assert (rollout.reward, rollout.has_rl, rollout.has_opd, rollout.group_mean) == (None, False, True, None)
    assert rollout.token_ids == s.token_ids and digest_holds(rollout) and rollout.event_time == START + 200
    assert (written.outcomes[late].rollout_id, written.outcomes[late].rollout_digest) == (opd, rollout.digest)
    assert written.outcomes[late].has_opd and not written.outcomes[late].has_rl


@pytest.mark.parametrize("kind", [NONE, REJECTED])
def test_a_late_hint_that_says_nothing_is_only_counted(kind: HintKind) -> None:
    s = sample(head())
    written = fold((0, score(s)), (101, tick()), (200, hint(s, kind)))
    assert set(written.rollouts) == {"t1/0"} and written.outcomes[f"t1/0/late/{hint(s).hint_id}"].rollout_id is None


def test_a_hint_after_the_marker_is_gone_still_becomes_a_rollout() -> None:
    s = sample(head())
    written = fold((0, score(s)), (101, tick()), (101 + 5001, tick()), (6000, hint(s)), (6001, hint(s)))
    assert set(written.rollouts) == {"t1/0", f"t1/0/opd/{hint(s).hint_id}"}
    assert kinds(written.outcomes) == {"t1/0": "rl", f"t1/0/late/{hint(s).hint_id}": "late"}
    assert len(written.produced) == 4, "the second copy of the late hint has no effect"


def test_a_score_after_the_marker_is_gone_does_not_open_the_task_again() -> None:
    s = sample(head(opd=None))
    written = fold((0, score(s)), (5002, tick()), (5003, score(s, id="again")), (20_000, tick()))
    assert kinds(written.outcomes) == {"t1/0": "rl", "t1/0/late/again": "late"}


def test_how_long_a_closed_task_is_remembered_to_the_millisecond() -> None:
    s = sample(head(opd=None))
    again = score(s, at=START + 5000, id="again")
    assert kinds(fold((0, score(s)), (5000, again)).outcomes) == {"t1/0": "rl", "t1/0/late/again": "late"}
    written = fold((0, score(s)), (5001, again))
    assert len(written.produced) == 4, "forgotten: a half that claims a new opening opens it"


def test_how_old_a_half_may_be_to_open_a_task_to_the_millisecond() -> None:
    s = sample(head(opd=None))
    assert set(fold((5000, score(s))).outcomes) == {"t1/0", f"t1/0/late/{score(s).score_id}"}
    assert set(fold((5001, score(s))).outcomes) == {f"t1/0/late/{score(s).score_id}"}


def test_an_open_that_is_too_old_says_so_for_each_sample() -> None:
    written = fold((5001, open_(head(n=2))), (5002, open_(head(n=2))), (7000, tick()))
    ident = open_(head()).open_id
    assert kinds(written.outcomes) == {f"t1/0/late/{ident}": "late", f"t1/1/late/{ident}": "late"}
    assert len(written.produced) == 2


@pytest.mark.parametrize("which", ["score", "hint"])
def test_the_same_half_twice_has_one_effect(which: str) -> None:
    s = sample(head())
    twice = score(s) if which == "score" else hint(s)
    other = hint(s) if which == "score" else score(s)
    written = fold((0, twice), (5, twice), (10, other), (20, twice), (30, other))
    assert kinds(written.outcomes) == {"t1/0": "both"} and len(written.produced) == 2


def test_several_feedbacks_for_one_sample_the_first_joins_the_others_are_late() -> None:
    s = sample(head())
    first, second = hint(s, id="h1"), hint(s, id="h2")
    written = fold((0, first), (5, second), (10, score(s)), (20, hint(s, id="h3")))
    assert kinds(written.outcomes) == {"t1/0": "both", "t1/0/late/h2": "late", "t1/0/late/h3": "late"}
    assert set(written.rollouts) == {"t1/0"}, "the sample has its hint already"


def test_after_a_hint_that_said_nothing_the_next_one_becomes_a_rollout_of_its_own() -> None:
    s = sample(head())
    written = fold((0, score(s)), (5, hint(s, NONE, id="h1")), (10, hint(s, id="h2")), (15, hint(s, id="h3")))
    assert kinds(written.outcomes) == {"t1/0": "rl", "t1/0/late/h2": "late", "t1/0/late/h3": "late"}
    assert set(written.rollouts) == {"t1/0", "t1/0/opd/h2"}


def test_feedback_from_a_source_that_terms_do_not_name_never_closes_a_slot() -> None:
    s = sample(head())
    stranger = hint(s, source=Source.OPERATOR)
    written = fold((0, score(s)), (10, stranger), (20, score(s, source=Source.USER)), (1001, tick()))
    assert kinds(written.outcomes) == {
        f"t1/0/late/{stranger.hint_id}": "late",
        f"t1/0/late/{score(s, source=Source.USER).score_id}": "late",
        "t1/0": "rl",
    }
    assert set(written.rollouts) == {"t1/0", f"t1/0/opd/{stranger.hint_id}"}


def thumb(s: Sample, reward: float = -1.0, *, id: str = "") -> Score:
    """A grade that is the whole reward of a turn, as scoring marks it."""
    made = score(s, reward, source=Source.USER, id=id or derived_id("score", s.result_id, "thumb"))
    return made.model_copy(update={"components": {EXPLICIT: reward}})


@pytest.mark.parametrize("known", [1.0, None])
def test_a_late_thumb_becomes_a_rollout_that_replaces_the_reward(known: float | None) -> None:
    s = sample(head())
    late = thumb(s)
    written = fold((0, score(s, known)), (5, hint(s, NONE)), (20, late), (30, late))
    key, where = f"t1/0/grade/{late.score_id}", f"t1/0/late/{late.score_id}"
    assert set(written.rollouts) == ({"t1/0", key} if known else {key})
    rollout = written.rollouts[key]
    assert (rollout.reward, rollout.has_rl, rollout.has_opd, rollout.n_closed) == (-1.0, True, False, 1)
    assert (rollout.group_mean, rollout.group_std, rollout.token_ids) == (-1.0, 0.0, s.token_ids)
    assert [(half.half, half.half_id, half.offset) for half in rollout.provenance] == [("score", late.score_id, 2)]
    assert digest_holds(rollout) and graded_sample(key) == "t1/0" and rollout_task_id(key) == "t1"
    outcome = written.outcomes[where]
    assert (outcome.kind.value, outcome.rollout_id, outcome.has_rl, outcome.reward) == ("late", key, True, -1.0)
    assert len(written.produced) == (4 if known else 3), "the same thumb again changes nothing"


def test_a_thumb_after_the_score_replaces_it_also_while_a_hint_is_awaited() -> None:
    s = sample(head())
    written = fold((0, score(s)), (20, thumb(s)), (30, hint(s)))
    assert set(written.rollouts) == {"t1/0", f"t1/0/grade/{thumb(s).score_id}"}
    assert written.rollouts["t1/0"].has_opd and written.rollouts["t1/0"].reward == 1.0


def test_a_thumb_before_the_score_is_in_the_score_and_no_rollout() -> None:
    s = sample(head())
    for earlier in (thumb(s), hint(s)):
        written = fold((0, earlier), (5, thumb(s)), (10, score(s, -1.0)), (20, hint(s)))
        assert set(written.rollouts) == {"t1/0"}


def test_a_late_thumb_that_cannot_replace_a_reward_is_counted() -> None:
    group, failed, said = head(n=2), head(), sample(head())
    unmarked = score(said, -1.0, source=Source.USER)
    empty = said.model_copy(update={"token_ids": b"", "loss_mask": b"", "sampler_logprobs": b""})
    broken = sample(failed, status=Status.FAILED)
    for first, late in (
        (score(said), unmarked),  # a part of a combined reward
        (score(broken, -1.0), thumb(broken, 1.0)),
        (score(empty), thumb(empty)),
    ):
        written = fold((0, first), (5, hint(first.sample, NONE)), (20, late))
        assert not any("grade" in key for key in written.rollouts) and len(written.outcomes) == 2
    both = [sample(group, index) for index in (0, 1)]
    halves = [half for s in both for half in (score(s), hint(s))]
    written = fold(*((i, half) for i, half in enumerate(halves)), (20, thumb(both[0])))
    assert set(written.rollouts) == {"t1/0", "t1/1"}, "it would change the mean of the others"
    forgotten = fold((0, score(said)), (5, hint(said)), (6, forget(user_id="user-t1")), (20, thumb(said)))
    assert set(forgotten.rollouts) == {"t1/0"}


def test_a_half_of_another_source_never_opens_a_task() -> None:
    s = sample(head())
    stranger = score(s, source=Source.USER)
    written = fold((0, stranger), (10, stranger), (2000, tick()))
    assert kinds(written.outcomes) == {f"t1/0/late/{stranger.score_id}": "late"} and len(written.produced) == 1
    written = fold((0, stranger), (10, open_(head())), (20, score(s)), (30, hint(s)), (40, stranger))
    assert kinds(written.outcomes) == {f"t1/0/late/{stranger.score_id}": "late", "t1/0": "both"}


def test_terms_that_open_with_the_first_feedback_count_from_there() -> None:
    task = head(rl=Source.NEXT_STATE, opd=None, opens="first_feedback")
    s = sample(task)
    written = fold((50_000, score(s, 0.5, at=START + 49_990, source=Source.NEXT_STATE)))
    assert kinds(written.outcomes) == {"t1/0": "rl"}


def test_the_second_answer_of_a_worker_run_again_is_superseded_and_never_mixed() -> None:
    one, two = sample(head(), result="r1"), sample(head(), result="r2")
    written = fold((0, score(one, 1.0)), (10, hint(two)), (20, score(two, -1.0)), (30, hint(one)))
    key = f"t1/0/superseded/{two.result_id}"
    assert kinds(written.outcomes) == {key: "superseded", "t1/0": "both"}
    assert len(written.produced) == 3, "a superseded result is told once"
    rollout = written.rollouts["t1/0"]
    assert rollout.token_ids == one.token_ids and rollout.result_id == one.result_id and rollout.reward == 1.0


def test_a_late_hint_of_a_superseded_result_is_no_rollout() -> None:
    one, two = sample(head(), result="r1"), sample(head(), result="r2")
    written = fold((0, score(one)), (101, tick()), (200, hint(two)))
    assert kinds(written.outcomes) == {"t1/0": "rl", f"t1/0/superseded/{two.result_id}": "superseded"}
    assert set(written.rollouts) == {"t1/0"}


def test_a_failed_result_is_a_negative_signal() -> None:
    task = head(n=2, opd=None)
    failed, good = sample(task, 0, status=Status.FAILED), sample(task, 1)
    written = fold((0, score(failed, -1.0)), (10, score(good, 1.0)))
    assert kinds(written.outcomes) == {"t1/0": "failed", "t1/1": "rl"}
    outcome, rollout = written.outcomes["t1/0"], written.rollouts["t1/0"]
    assert (outcome.reward, outcome.has_rl, outcome.not_trainable) == (-1.0, True, "status failed")
    assert rollout.n_tokens == 0 and rollout.reward == -1.0
    assert (written.rollouts["t1/1"].group_mean, written.rollouts["t1/1"].group_std) == (0.0, 1.0)


def test_a_failed_result_takes_no_hint_late_or_not() -> None:
    s = sample(head(), status=Status.FAILED)
    written = fold((0, score(s, -1.0)), (10, hint(s)), (20, hint(s, id="h2")))
    assert kinds(written.outcomes) == {"t1/0": "failed", "t1/0/late/h2": "late"}
    assert not written.rollouts["t1/0"].has_opd and set(written.rollouts) == {"t1/0"}


def test_a_sample_that_is_not_trainable_by_ratio_is_emitted_and_says_why() -> None:
    s = sample(head(opd=None))
    greedy = s.model_copy(update={"sampling": s.sampling.model_copy(update={"temperature": 0.0})})
    written = fold((0, score(greedy)))
    assert written.outcomes["t1/0"].kind is OutcomeKind.RL and written.rollouts["t1/0"].has_rl
    assert written.outcomes["t1/0"].not_trainable == "greedy sampling"


def test_a_complete_group_is_emitted_with_its_statistics_in_sample_order() -> None:
    task = head(n=3, opd=None)
    rewards = [0.1, 0.2, 0.3]
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1, "the order shows in the last bit"
    written = fold(*((10 * (3 - i), score(sample(task, i), rewards[i])) for i in (2, 1, 0)))
    mean = ((0.1 + 0.2) + 0.3) / 3
    std = (((0.1 - mean) ** 2 + (0.2 - mean) ** 2 + (0.3 - mean) ** 2) / 3) ** 0.5
    for i in range(3):
        rollout = written.rollouts[f"t1/{i}"]
        assert rollout.group_mean == mean and rollout.group_std == pytest.approx(std, abs=1e-15)
        assert (rollout.n_requested, rollout.n_closed) == (3, 3) and written.outcomes[f"t1/{i}"].n_closed == 3
    keys = [key for _, key, _ in written.produced]
    assert keys == ["t1/0", "t1/0", "t1/1", "t1/1", "t1/2", "t1/2"]


def test_a_group_cut_by_the_deadline_counts_over_what_closed() -> None:
    task = head(n=4, opd=Source.USER, opd_window_ms=5000)
    written = fold(
        (0, open_(task)),
        (10, score(sample(task, 0), 1.0)),
        (20, hint(sample(task, 1))),
        (30, score(sample(task, 2), 0.5)),
        (40, hint(sample(task, 2), NONE)),
        (1001, tick()),
    )
    assert kinds(written.outcomes) == {"t1/0": "rl", "t1/1": "opd", "t1/2": "rl", "t1/3": "expired"}
    assert {rollout.n_closed for rollout in written.rollouts.values()} == {3}
    assert {rollout.group_mean for rollout in written.rollouts.values()} == {0.75}
    assert {outcome.n_closed for outcome in written.outcomes.values()} == {3}
    assert set(written.rollouts) == {"t1/0", "t1/1", "t1/2"}


def test_a_slot_whose_wait_for_a_hint_is_over_takes_none_while_its_group_waits() -> None:
    task = head(n=2)
    one, two = sample(task, 0), sample(task, 1)
    written = fold((0, score(one)), (101, tick()), (150, hint(one)), (160, score(two)), (170, hint(two)))
    assert kinds(written.outcomes) == {f"t1/0/late/{hint(one).hint_id}": "late", "t1/0": "rl", "t1/1": "both"}
    assert not written.rollouts["t1/0"].has_opd and f"t1/0/opd/{hint(one).hint_id}" in written.rollouts


def test_each_slot_has_a_wait_of_its_own() -> None:
    task = head(n=2)
    written = fold(
        (0, score(sample(task, 0))), (50, score(sample(task, 1))), (101, tick()), (150, tick()), (151, tick())
    )
    assert {outcome.event_time for outcome in written.outcomes.values()} == {START + 151}
    assert kinds(written.outcomes) == {"t1/0": "rl", "t1/1": "rl"}


def test_a_task_heard_of_before_it_opened_is_remembered_from_its_closing() -> None:
    s = sample(head(opd=None))
    stranger = score(s, source=Source.USER)
    closing = score(s, at=START + 3000)
    written = fold((0, stranger), (3000, closing), (5001, tick()), (5002, closing), (8000, closing))
    assert set(written.outcomes) == {f"t1/0/late/{stranger.score_id}", "t1/0"}
    assert len(written.produced) == 3, "known again and again: nothing more"


def test_stream_time_never_runs_backwards() -> None:
    s = sample(head())
    written = fold((0, score(s)), (150, tick()), (50, hint(s)))
    assert kinds(written.outcomes)["t1/0"] == "rl", "the window was over when the hint came, whatever its stamp"
    assert written.outcomes[f"t1/0/late/{hint(s).hint_id}"].event_time == START + 150


def test_timeouts_fire_in_order_of_due_and_task() -> None:
    tasks = [head("c", deadline_ms=50), head("a", deadline_ms=70), head("b", deadline_ms=50), head("d", opd=None)]
    written = fold(*((0, open_(task)) for task in tasks), (80, score(sample(tasks[3]))))
    assert [key for _, key, _ in written.produced] == ["b/0", "c/0", "a/0", "d/0", "d/0"]


def test_an_opening_in_the_future_counts_from_the_record_that_tells_of_it() -> None:
    written = fold((0, open_(head(), at=START + 10**12)), (1001, tick()))
    assert kinds(written.outcomes) == {"t1/0": "expired"}


def test_bad_records_are_dead_letters_and_move_time_all_the_same() -> None:
    s = sample(head())
    written = fold((0, score(s)), (101, b"rubbish"), (102, hint(s)))
    assert written.dead == [(1, "decode")]
    assert kinds(written.outcomes)["t1/0"] == "rl" and written.outcomes["t1/0"].event_time == START + 101


def test_halves_that_contradict_their_task_are_dead_letters() -> None:
    s = sample(head(n=2))
    strangers = [
        sample(head(n=3), 2),  # out of the range that the task is known to have
        sample(head(n=2, rl=None)),  # other terms
        s.model_copy(update={"response_digest": "another"}),  # one result, two answers
    ]
    written = fold((0, score(s)), *((10, hint(other, id=f"h{i}")) for i, other in enumerate(strangers)))
    assert written.dead == [(1, "validate"), (2, "validate"), (3, "validate")] and not written.outcomes
    longer = sample(head(n=2), n=5)
    assert fold((0, score(s)), (10, hint(longer))).dead == [(1, "validate")], "log-probs of other tokens"


@pytest.mark.parametrize("first", [open_(head("t2")), score(sample(head("t2"))), hint(sample(head("t2")))])
def test_a_task_on_another_partition_than_its_keys_is_a_dead_letter(first: Record) -> None:
    """Both partitions would write an outcome of it, under one key. Of a task that is known nobody looks again."""
    right = partition_of(b"t2", 8)
    assert right != PARTITION
    processor = worker({})
    elsewhere = record_at(0, 0, first)._replace(partitions=8)
    (dead,) = drive(processor.process(PARTITION, [elsewhere])).dead
    assert dead.stage == "validate"
    assert (
        f"'t2' hashes to partition {right} of 8, but it is on partition 3: the producer must place keys by murmur2"
        in dead.error
    )
    clock = record_at(1, 1, tick())._replace(partitions=8)
    assert not drive(processor.process(PARTITION, [clock])).dead, "a tick is of its partition, whatever its key"
    at_home = [record_at(2, 2, first)._replace(partition=right, partitions=8), record_at(3, 3, first)]
    processor.restore(right, {})
    assert not drive(processor.process(right, at_home)).dead


def test_tasks_beyond_the_limits_are_dead_letters() -> None:
    too_long = head(deadline_ms=LIMITS.marker_ttl_ms)
    too_many = head(n=LIMITS.max_samples + 1)
    written = fold((0, open_(too_long)), (1, score(sample(too_long))), (2, open_(too_many)), (9999, tick()))
    assert written.dead == [(0, "validate"), (1, "validate"), (2, "validate")] and not written.outcomes


def test_a_task_closed_and_forgotten_is_not_opened_by_the_next_feedback() -> None:
    """Terms that open with the first feedback: every half brings a fresh `opened_at`."""
    task = head(rl=Source.USER, opd=Source.USER, opens=Opens.FIRST_FEEDBACK)
    s, again = sample(task), LIMITS.marker_ttl_ms + 20
    second = score(s, source=Source.USER, at=START + again, id="s2", task_at=START)
    other = hint(s, at=START + again, id="h2", task_at=START)
    opened = open_(task, START + again, START)
    written = fold(
        (10, score(s, source=Source.USER, at=START + 10, task_at=START)),
        (11, hint(s, at=START + 11, task_at=START)),
        (again, tick()),
        *((again, late) for late in (opened, second, other)),
        (again + 2000, tick()),
    )
    late = dict.fromkeys((f"t1/0/late/{id}" for id in (opened.open_id, "s2", "h2")), "late")
    assert kinds(written.outcomes) == {"t1/0": "both"} | late
    assert [key for topic, key, _ in written.produced if topic == topics.OUTCOMES].count("t1/0") == 1
    assert set(written.rollouts) == {"t1/0", "t1/0/opd/h2"}


def test_a_first_feedback_opens_its_task_until_that_is_as_old_as_markers_live() -> None:
    task = head(rl=Source.USER, opd=Source.USER, opens=Opens.FIRST_FEEDBACK)
    s, ttl = sample(task), LIMITS.marker_ttl_ms
    for after, task_at, kind in ((ttl, START, "rl"), (ttl + 1, START, "late"), (9 * ttl, None, "rl")):
        said = score(s, source=Source.USER, at=START + after, task_at=task_at)
        written = fold((after, open_(task, START + after, task_at)), (after, said), (after + 2000, tick()))
        assert written.outcomes["t1/0" if kind == "rl" else f"t1/0/late/{said.score_id}"].kind.value == kind
        assert ("t1/0" in written.outcomes) == ("t1/0" in written.rollouts) == (kind == "rl")


def test_a_failed_answer_is_late_by_its_tasks_age_too() -> None:
    s, after = sample(head(), status=Status.FAILED), LIMITS.marker_ttl_ms + 1
    written = fold((after, score(s, -1.0, at=START + after, task_at=START)))
    assert set(kinds(written.outcomes).values()) == {"late"} and not written.rollouts


def test_a_task_announced_twice_is_one_task() -> None:
    written = fold((0, open_(head())), (500, open_(head(), at=START + 500)), (1001, tick()), (1100, open_(head())))
    assert kinds(written.outcomes) == {"t1/0": "expired"} and len(written.produced) == 1


def test_forgetting_a_user_closes_what_is_open_without_its_halves() -> None:
    mine, theirs = head("t1", n=2), head("t2")
    s = sample(mine)
    written = fold(
        (0, score(s)),
        (0, score(sample(theirs))),
        (10, forget(user_id="user-t1")),
        (20, hint(s)),
        (30, hint(sample(theirs))),
    )
    late = f"t1/0/late/{hint(s).hint_id}"
    assert kinds(written.outcomes) == {"t1/0": "expired", "t1/1": "expired", late: "late", "t2/0": "both"}
    assert set(written.rollouts) == {"t2/0"}, "nothing of the one who left, a late hint included"


def test_forgetting_by_session_and_by_age() -> None:
    halves = [(0, score(sample(head("t1")))), (50, score(sample(head("t2")), at=START + 50))]
    assert set(fold(*halves, (60, forget(session_id="session-t2"))).outcomes) == {"t2/0"}
    assert set(fold(*halves, (60, forget(before=START + 50))).outcomes) == {"t1/0"}
    assert not fold(*halves, (60, forget())).outcomes
    written = fold(*reversed(halves), (60, forget(before=START + 60)))
    assert [key for _, key, _ in written.produced] == ["t1/0", "t2/0"]


def test_halves_in_flight_of_a_forgotten_user_are_late() -> None:
    """A result that scoring had not seen yet, a hint for a task that had closed: outcomes, but nothing to train on."""
    closed, unscored = head("t1"), head("t2").model_copy(update={"user_id": "user-t1"})
    s = sample(closed)
    written = fold(
        (0, score(s)),
        (101, tick()),
        (110, forget(user_id="user-t1")),
        (120, hint(s)),
        (130, open_(unscored)),
        (131, score(sample(unscored))),
        (132, hint(sample(unscored))),
    )
    assert set(written.rollouts) == {"t1/0"}, "only what was there before"
    late = {f"t1/0/late/{hint(s).hint_id}", f"t2/0/late/{open_(unscored).open_id}"}
    late |= {f"t2/0/late/{half.event_id}" for half in (score(sample(unscored)), hint(sample(unscored)))}
    assert kinds(written.outcomes) == {"t1/0": "rl"} | dict.fromkeys(late, "late")


def test_a_request_narrowed_by_age_or_policy_leaves_the_rest_alone() -> None:
    def both(task: TaskHead, at: int) -> list[tuple[int, Record | bytes]]:
        return [(at, score(sample(task), at=START + at)), (at, hint(sample(task), at=START + at))]

    early, late = head("t1"), head("t2").model_copy(update={"user_id": "user-t1"})
    by_age = fold((0, forget(user_id="user-t1", before=START + 50)), *both(early, 40), *both(late, 50))
    assert set(by_age.rollouts) == {"t2/0"}
    other = early.model_copy(update={"policy": "another"})
    assert set(fold((0, forget(user_id="user-t1", policy="assistant")), *both(other, 1)).rollouts) == {"t1/0"}
    assert not fold((0, forget(user_id="user-t1", policy="assistant")), *both(early, 1)).rollouts


def test_a_request_is_remembered_as_long_as_its_sources_are_kept() -> None:
    s, ttl = sample(head()), LIMITS.forget_ttl_ms
    for at, outcome in ((ttl, {"late"}), (ttl + 1, {"both"})):
        halves = (at, score(s, at=START + at)), (at, hint(s, at=START + at))
        assert set(kinds(fold((0, forget(user_id="user-t1")), *halves).outcomes).values()) == outcome


def test_a_sample_whose_infrastructure_failed_is_in_no_group_and_in_no_rollout() -> None:
    task = head(n=3, opd=None)
    lost = sample(task, 2, "r2", status=Status.INFRA)
    scores = [score(sample(task, i, f"r{i}"), reward) for i, reward in enumerate((0.0, 1.0))]
    written = fold((10, open_(task)), *((20, each) for each in scores), (30, score(lost, None)))
    assert kinds(written.outcomes) == {"t1/0": "rl", "t1/1": "rl", "t1/2": "infra"}
    assert (written.outcomes["t1/2"].reward, written.outcomes["t1/2"].rollout_id) == (None, None)
    assert {(r.n_closed, r.n_rewarded, r.group_mean, r.group_std) for r in written.rollouts.values()} == {
        (3, 2, 0.5, 0.5)
    }
