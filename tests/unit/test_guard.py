"""The judgement on a version: the collapse to one-word answers, and what else must not be served."""

import pytest

from tentalis.guard import BadGuard, Evidence, Limits, Mode, Rule, judge

BASE = Evidence(16, 40.0, 0.0, 0.1)
GOOD = Evidence(16, 30.0, 0.05, 0.6)


def test_the_collapse_to_one_word_is_refused_although_its_score_is_better() -> None:
    one_word = Evidence(16, 2.0, 0.4, 1.0)
    reasons = judge(one_word, Limits(), base=BASE, served=GOOD)
    assert len(reasons) == 2
    assert "answers have 2.0 tokens on average, less than 4" in reasons[0]
    assert "0.05 times as long as the base model's" in reasons[1]
    # Also where nothing else is known of it.
    assert judge(one_word, Limits())


def test_a_good_version_passes() -> None:
    assert judge(GOOD, Limits(), base=BASE, served=Evidence(16, 35.0, 0.02, 0.7)) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Evidence(16, 161.0, 0.1, 0.6), "4.03 times as long"),
        (Evidence(16, 30.0, 1.5, 0.6), "KL divergence from the base model is 1.5"),
        (Evidence(16, 30.0, float("nan"), 0.6), "KL divergence"),
        (Evidence(16, 30.0, 0.1, 0.3), "it fell by more than 0.2"),
        (Evidence(0, 0.0), "it gave no answer"),
    ],
)
def test_what_must_not_be_served_is_told_why(seen: Evidence, words: str) -> None:
    (reason,) = judge(seen, Limits(), base=BASE, served=GOOD)
    assert words in reason


def test_what_nothing_measured_is_not_held_against_it() -> None:
    assert judge(Evidence(16, 30.0), Limits(), served=GOOD) == []
    assert judge(GOOD, Limits(), served=Evidence(16, 30.0)) == []


def test_limits_come_from_the_run_and_old_manifests_promote_always() -> None:
    assert Rule.of_config("steps: 3\n") == Rule(Mode.ALWAYS)
    rule = Rule.of_config("promotion: guarded\nguard: {max_kl: 0.5, fixture: [Hello]}\n")
    assert (rule.mode, rule.limits.max_kl, rule.limits.fixture) == (Mode.GUARDED, 0.5, ("Hello",))
    for bad in ("promotion: sometimes\n", "guard: {max_lk: 1}\n", "- a\n", "a: [\n"):
        with pytest.raises(BadGuard):
            Rule.of_config(bad)


def test_evidence_survives_its_record() -> None:
    assert Evidence.of_metrics(GOOD.metrics("base_"), "base_") == GOOD
    assert Evidence.of_metrics({}) is None
