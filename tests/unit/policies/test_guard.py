"""The judgement on a version: the collapse to one-word answers, and what else must not be served."""

import pytest

from tentalis.policies.guard import BadGuard, GuardEvidence, GuardLimits, GuardMode, GuardRule
from tentalis.policies.guard_decision import TrialDecision, decide, judge

BASE = GuardEvidence(16, 40.0, 0.0, 0.1)
GOOD = GuardEvidence(16, 30.0, 0.05, 0.6)


def test_the_collapse_to_one_word_is_refused_although_its_score_is_better() -> None:
    one_word = GuardEvidence(16, 2.0, 0.4, 1.0)
    reasons = judge(one_word, GuardLimits(), base=BASE, served=GOOD)
    assert len(reasons) == 2
    assert "answers have 2.0 tokens on average, less than 4" in reasons[0]
    assert "0.05 times as long as the base model's" in reasons[1]
    # Also where nothing else is known of it.
    assert judge(one_word, GuardLimits())


def test_a_good_version_passes() -> None:
    assert judge(GOOD, GuardLimits(), base=BASE, served=GuardEvidence(16, 35.0, 0.02, 0.7)) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (GuardEvidence(16, 161.0, 0.1, 0.6), "4.03 times as long"),
        (GuardEvidence(16, 30.0, 1.5, 0.6), "KL divergence from the base model is 1.5"),
        (GuardEvidence(16, 30.0, float("nan"), 0.6), "KL divergence"),
        (GuardEvidence(0, 0.0), "it gave no answer"),
    ],
)
def test_what_must_not_be_served_is_told_why(seen: GuardEvidence, words: str) -> None:
    (reason,) = judge(seen, GuardLimits(), base=BASE, served=GOOD)
    assert words in reason


def test_a_drop_of_the_score_is_refused_by_its_size_where_answers_are_not_paired() -> None:
    (reason,) = judge(GuardEvidence(16, 30.0, 0.1, 0.3), GuardLimits(min_answers=0), base=BASE, served=GOOD)
    assert "it fell by more than 0.2" in reason


SHAPE = {"kl": 0.1, "distinct": 0.9, "similarity": 0.1, "unfinished": 0.1}


def scored(scores: tuple[float, ...], length: float = 20.0, **shape: float) -> GuardEvidence:
    return GuardEvidence(len(scores), length, score=sum(scores) / len(scores), scores=scores, **(SHAPE | shape))


def decided(candidate: GuardEvidence, complete: bool = False, limits: GuardLimits = GuardLimits()) -> TrialDecision:
    reference = scored((0.5,) * candidate.answers)
    return decide(candidate, limits, base=reference, served=reference, complete=complete)[0]


def test_a_candidate_far_from_all_limits_passes_early() -> None:
    equal = scored((0.5,) * 8)
    assert decided(equal) is TrialDecision.PASS
    assert decided(equal, limits=GuardLimits(early_pass=0.0)) is TrialDecision.MORE
    assert decided(equal, complete=True) is TrialDecision.PASS


@pytest.mark.parametrize(
    "near",
    [
        scored((0.5,) * 8, length=5.0),
        scored((0.5,) * 8, length=20.0 * 0.2),
        scored((0.5,) * 8, length=20.0 * 2.2),
        scored((0.5,) * 8, kl=0.8),
        scored((0.5,) * 8, distinct=0.9 * 0.3),
        scored((0.5,) * 8, similarity=0.5),
        scored((0.5,) * 8, unfinished=0.35),
        scored((0.1,) * 8),
    ],
)
def test_a_candidate_near_a_limit_or_with_a_lower_score_needs_all_answers(near: GuardEvidence) -> None:
    assert decided(near) is TrialDecision.MORE
    assert decided(near, complete=True) is TrialDecision.PASS


@pytest.mark.parametrize(
    "beyond",
    [
        scored((0.5,) * 8, length=3.0),
        scored((0.5,) * 8, length=20.0 * 3.9),
        scored((0.5,) * 8, kl=1.1),
        scored((0.5,) * 8, distinct=0.2),
        scored((0.5,) * 8, similarity=1.0),
        scored((0.5,) * 8, unfinished=1.0),
    ],
)
def test_a_candidate_beyond_a_limit_of_its_shape_is_refused_when_all_answers_are_there(beyond: GuardEvidence) -> None:
    assert decided(beyond) is TrialDecision.MORE
    assert decided(beyond, complete=True) is TrialDecision.REFUSE


def test_a_candidate_whose_scores_show_a_drop_is_refused_at_once() -> None:
    assert decided(scored((-1.0,) * 16)) is TrialDecision.REFUSE


def test_limits_that_are_off_stay_off_before_all_answers_are_there() -> None:
    off = GuardLimits(
        min_length=0.0, min_length_ratio=0.0, min_distinct_ratio=0.0, max_similarity=1.0, max_unfinished_rise=1.0
    )
    assert decided(scored((0.5,) * 8, length=1.0, distinct=0.0, similarity=1.0, unfinished=1.0), limits=off) is (
        TrialDecision.PASS
    )


def test_a_judge_needs_an_address_and_a_model() -> None:
    assert GuardLimits().judge.url is None
    for bad, words in (({"url": "http://judge"}, "url needs model"), ({"url": "judge", "model": "m"}, "name a host")):
        with pytest.raises(ValueError, match=words):
            GuardLimits.model_validate({"judge": bad})


def test_what_nothing_measured_is_not_held_against_it() -> None:
    assert judge(GuardEvidence(16, 30.0), GuardLimits(), served=GOOD) == []
    assert judge(GOOD, GuardLimits(), served=GuardEvidence(16, 30.0)) == []


def test_limits_come_from_the_run_and_old_manifests_promote_always() -> None:
    assert GuardRule.of_config("steps: 3\n").mode is GuardMode.ALWAYS
    rule = GuardRule.of_config("promotion: guarded\nguard: {max_kl: 0.5, fixture: [Hello]}\n")
    assert (rule.mode, rule.limits.max_kl, rule.limits.fixture) == (GuardMode.GUARDED, 0.5, ("Hello",))
    for bad in ("promotion: sometimes\n", "guard: {max_lk: 1}\n", "- a\n", "a: [\n"):
        with pytest.raises(BadGuard):
            GuardRule.of_config(bad)


def test_old_manifests_keep_their_limits_and_new_ones_say_theirs() -> None:
    old = GuardRule.of_config("promotion: guarded\nguard: {max_kl: 0.5}\n").limits
    assert (old.min_answers, old.max_length_ratio, old.max_similarity) == (0, 4.0, 1.0)
    assert GuardRule.of_config(f"guard: {GuardLimits().model_dump_json()}\n").limits == GuardLimits()


def test_evidence_survives_its_record() -> None:
    assert GuardEvidence.of_metrics(GOOD.metrics("base_"), "base_") == GOOD
    assert GuardEvidence.of_metrics({}) is None
