"""The comparison of held-out rewards, and the judgement of a reward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.learning.compare import compare, mean_of, p_paired
from tentalis.learning.findings import judge_rewards


def test_pairs_with_an_unknown_reward_are_left_out_and_counted() -> None:
    found = compare([0.0, None, 0.5, 0.0], [1.0, 1.0, 1.0, None])
    assert found is not None
    assert (found.prompts, found.unknown) == (2, 2)
    assert (found.before.mean, found.after.mean, found.difference.mean) == (0.25, 1.0, 0.75)
    assert "Left out: 2 prompts" in found.sentence()
    assert compare([None], [1.0]) is None


def test_the_test_is_exact_for_few_pairs_and_two_sided() -> None:
    assert p_paired([1.0, 1.0, 1.0]) == pytest.approx(2 / 8)
    assert p_paired([-1.0, -1.0, -1.0]) == pytest.approx(2 / 8)
    assert p_paired([0.0, 0.0]) == 1.0
    assert p_paired([0.5] * 40) < 0.001
    only = compare([0.0], [1.0])
    assert only is not None and only.p_value is None and "1 held-out prompt:" in only.sentence()


@settings(max_examples=20)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_the_interval_holds_the_mean_and_lies_within_the_values(values: list[float]) -> None:
    found = mean_of(values)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert mean_of(values) == found, "the same values give the same interval"


def test_the_interval_narrows_with_more_values() -> None:
    few, many = mean_of([0.0, 1.0] * 4), mean_of([0.0, 1.0] * 200)
    assert many.high - many.low < (few.high - few.low) / 3
    assert many.low < 0.5 < many.high


def test_a_good_reward_has_no_remarks() -> None:
    found = judge_rewards([[0.0, 1.0], [1.0, 0.5]], ranged=False)
    assert (found.useless, found.remarks, found.solved, found.middle) == (False, (), 0.75, 0.5)


def test_a_constant_reward_is_useless() -> None:
    found = judge_rewards([[0.3, 0.3], [0.3, 0.3]], ranged=False)
    assert found.useless and len(found.remarks) == 1 and "constant: each of 4 answers has 0.3" in found.remarks[0]


def test_a_reward_that_never_reaches_its_middle_is_named_with_the_highest() -> None:
    found = judge_rewards([[0.0, 0.25], [0.1, 0.0]], ranged=False)
    assert not found.useless and found.solved == 0.0
    assert "reaches 0.5" in found.remarks[0] and "is 0.25" in found.remarks[0]


def test_the_range_is_that_of_the_log_if_it_was_declared_or_a_reward_is_negative() -> None:
    assert judge_rewards([[0.0, 0.25]], ranged=True).middle == 0.0
    assert judge_rewards([[0.25, -0.5]], ranged=False).middle == 0.0
    assert judge_rewards([[0.0, 0.25]], ranged=True).remarks == ()


def test_equal_groups_and_unknown_rewards_are_counted() -> None:
    found = judge_rewards([[1.0, 1.0], [None, 0.0]], ranged=False)
    assert "1 of 2 prompts have equal rewards" in found.remarks[1]
    assert "1 of 4 answers is unknown" in found.remarks[0]
    nothing = judge_rewards([[None, None]], ranged=False)
    assert nothing.useless and nothing.solved is None
