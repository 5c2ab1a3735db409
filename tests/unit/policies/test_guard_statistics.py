"""The guard's sequential test, its measures of diversity, and its error rates in simulation."""

import math
from pathlib import Path

import numpy as np
import pytest

from tentalis.policies import guard_simulation
from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_decision import judge
from tentalis.policies.guard_simulation import TrialRates
from tentalis.policies.guard_statistics import distinct_n, doubts, evidence_of_drop, similarity_across

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "guard.md"


def in_the_page() -> dict[str, TrialRates]:
    rows = [line.split("|")[1:4] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 4]
    return {name.strip(): TrialRates(float(refused), float(answers)) for name, refused, answers in rows[2:]}


def check(rates: dict[str, TrialRates], slack: float) -> None:
    """Each rate is within its bound. `slack`: for the chance in few simulated candidates."""
    assert rates["equal"].refused <= 0.05
    assert rates["better"].refused <= 0.01
    assert rates["slightly worse"].refused <= 0.15 + slack
    assert rates["clearly worse"].refused >= 0.95 - slack
    for name in ("one constant sentence", "3.9 times longer", "always at the limit"):
        assert rates[name].refused >= 0.95, name
    long = "a good candidate is tried for too long"
    assert rates["equal"].answers <= 24 + 40 * slack and rates["better"].answers <= 17, long


def test_the_rates_of_the_guard_are_within_their_bounds() -> None:
    check(guard_simulation.trial_rates(GuardLimits(), candidates=25, seed=1), slack=0.1)


def test_the_page_shows_rates_within_their_bounds_at_the_limits_of_today() -> None:
    rates = in_the_page()
    check(rates, slack=0.0)
    assert set(rates) == {kind.name for kind in guard_simulation.KINDS}
    again = "write it: python -m tentalis.policies.guard_simulation " + str(PAGE)
    assert PAGE.read_text(encoding="utf-8") == guard_simulation.page(rates), again


def test_the_evidence_of_one_pair_is_its_mean_bet_and_never_falls() -> None:
    assert evidence_of_drop([-1.0], [1.0]) == pytest.approx((1.1 + 1.2 + 1.4 + 1.8) / 4)
    assert evidence_of_drop([-1.0, 1.0], [1.0, -1.0]) == evidence_of_drop([-1.0], [1.0])
    assert evidence_of_drop([1.0], [-1.0]) == 1.0
    assert evidence_of_drop([-1.0, None, 0.0], [None, 1.0, 0.0]) == 1.0
    assert evidence_of_drop([-9.0], [9.0]) == evidence_of_drop([-1.0], [1.0])


def test_scores_give_doubt_while_the_pairs_speak_for_a_drop() -> None:
    assert doubts([-1.0] * 2, [1.0] * 2) and not doubts([1.0], [-1.0]) and not doubts([0.5], [0.5])
    assert not doubts([], []) and not doubts([None], [1.0])
    assert not doubts([-1.0, 1.0, 1.0], [1.0, -1.0, -1.0]), "an early doubt does not last"
    assert evidence_of_drop([-1.0, 1.0, 1.0], [1.0, -1.0, -1.0]) > 1.0


def test_looking_after_every_answer_keeps_the_error_rate() -> None:
    rng = np.random.default_rng(1)
    scores = rng.choice([-1.0, 1.0], (500, 2, 400))
    refused = np.mean([evidence_of_drop(*pair.tolist()) >= 20 for pair in scores])
    assert 0.0 < refused <= 0.05


def test_diversity_is_counted_by_tokens_and_over_different_prompts() -> None:
    assert distinct_n([[1, 2, 3], [1, 2, 3]]) == 0.5
    assert distinct_n([[7], [7]]) == 0.5
    assert distinct_n([[]]) is None
    assert similarity_across(["a", "b"], [[1, 2, 3, 4], [1, 2, 3, 5]]) == pytest.approx(1 / 3)
    assert similarity_across(["a", "a"], [[1, 2, 3], [1, 2, 3]]) is None
    assert similarity_across(["a", "b"], [[], []]) is None
    assert similarity_across(["a", "a", "b"], [[1, 2, 3], [1, 2, 3], [4, 5, 6]]) == 0.0


def evidence(scores: float = 1.0, **more: float) -> GuardEvidence:
    return GuardEvidence(64, 24.0, score=scores, scores=(scores,) * 64, **more)


def test_a_candidate_is_refused_if_it_is_worse_than_the_base_alone() -> None:
    (reason,) = judge(evidence(0.0), GuardLimits(), base=evidence(1.0), served=evidence(0.0))
    assert "that of the base model 1.00" in reason
    assert judge(evidence(0.0), GuardLimits(min_answers=0), base=evidence(1.0), served=evidence(0.0)) == []


def test_two_comparisons_share_the_error_rate() -> None:
    values = evidence_of_drop((0.0,) * 64, (0.1,) * 64)
    assert values > 1.0
    limits = GuardLimits(alpha=min(0.99, 1.5 / values))
    assert judge(evidence(0.0), limits, served=evidence(0.1))
    assert judge(evidence(0.0), limits, base=evidence(0.1), served=evidence(0.1)) == []


def test_a_collapse_that_the_base_shares_is_not_held_against_the_candidate() -> None:
    fit = {"distinct": 0.5, "similarity": 0.1, "unfinished": 0.1}
    for name, value in (("distinct", 0.1), ("similarity", 0.9), ("unfinished", 0.9)):
        collapsed = evidence(**(fit | {name: value}))
        assert len(judge(collapsed, GuardLimits(), base=evidence(**fit))) == 1, name
        assert judge(collapsed, GuardLimits(), base=collapsed) == [], name
    assert math.isclose(GuardLimits().alpha, 0.05)
