"""The judgement on a version: the collapse to one-word answers, and what else must not be served."""

import pytest

from tentalis.policies.guard import BadGuard, GuardEvidence, GuardLimits, GuardMode, GuardRule, judge

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
        (GuardEvidence(16, 30.0, 0.1, 0.3), "it fell by more than 0.2"),
        (GuardEvidence(0, 0.0), "it gave no answer"),
    ],
)
def test_what_must_not_be_served_is_told_why(seen: GuardEvidence, words: str) -> None:
    (reason,) = judge(seen, GuardLimits(), base=BASE, served=GOOD)
    assert words in reason


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
