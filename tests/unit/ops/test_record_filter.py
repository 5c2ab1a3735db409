"""Filters of `tentalis consume`: expressions of CEL on records as JSON objects."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.ops.record_filter import BadExpression, RecordFilter

SCORE: dict[str, Any] = {
    "topic": "tentalis.halves.v1",
    "partition": 3,
    "offset": 12,
    "timestamp": "2026-01-01T00:00:00.000Z",
    "key": "t1",
    "headers": {"ce_source": "scoring"},
    "type": "Score",
    "value": {"reward": -0.5, "sample": {"head": {"policy": "assistant"}, "token_ids": [1, 2, 3]}, "votes": ["a", "b"]},
}
OPEN = SCORE | {"type": "Open", "value": {"opened_at": 1}}
TOMBSTONE = {name: value for name, value in SCORE.items() if name not in ("type", "value")} | {"tombstone": True}


@pytest.mark.parametrize(
    "expression",
    [
        "value.reward < 0.0",
        'type == "Score" && value.sample.head.policy == "assistant"',
        'key.startsWith("t") && key.matches("^t[0-9]$")',
        "offset >= 12 && partition in [1, 3]",
        'value.votes.exists(vote, vote == "b")',
        "size(value.sample.token_ids) == 3",
        'headers["ce_source"] == "scoring"',
        "timestamp(timestamp) < timestamp('2026-06-01T00:00:00Z')",
        "has(value.reward) && !has(value.opened_at)",
        "!tombstone && error == null",
    ],
)
def test_an_expression_on_the_fields_of_a_record(expression: str) -> None:
    assert RecordFilter(expression).matches(SCORE)
    assert not RecordFilter(f"!({expression})").matches(SCORE)


def test_a_record_without_the_field_does_not_match_and_is_counted() -> None:
    found = RecordFilter("value.reward < 0.0")
    assert [found.matches(record) for record in (SCORE, OPEN, TOMBSTONE)] == [True, False, False]
    assert found.unevaluated == 2 and "reward" in found.first_reason
    assert RecordFilter("tombstone").matches(TOMBSTONE)


@pytest.mark.parametrize("expression", ['key.startsWith("t")', "size(key) > 0", "value.reward.contains('x')"])
def test_a_function_that_takes_no_null_or_number_does_not_end_the_command(expression: str) -> None:
    found = RecordFilter(expression)
    assert not found.matches(SCORE | {"key": None}) and found.unevaluated == 1


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("value.reward <", "not an expression of CEL"),
        ("", "not an expression"),
        ("nothing == 1", "The variables are topic"),
        ("key.nope()", "The variables are"),
        ("offset", "is 12, not true or false"),
    ],
)
def test_an_expression_that_cannot_be_meant_is_refused_with_the_reason(expression: str, said: str) -> None:
    with pytest.raises(BadExpression, match=said):
        RecordFilter(expression).matches(SCORE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_no_record_makes_a_good_expression_fail(value: Any) -> None:
    assert RecordFilter('value.a < 1 || key == "t1"').matches(SCORE | {"value": value}) in (True, False)


@pytest.mark.parametrize("expression", ["nosuch > 1", "nosuch(key)", "1", "'a' + 'b'"])
def test_a_wrong_expression_is_refused_before_the_first_record(expression: str) -> None:
    """A quiet topic would hide the error behind a wait."""
    with pytest.raises(BadExpression):
        RecordFilter(expression)


@pytest.mark.parametrize("expression", ["key", "value.a.b > 1", "has(value.x)", "dlq.error == 'x'", "size(key) > 3"])
def test_an_expression_that_only_some_records_can_answer_is_taken(expression: str) -> None:
    assert RecordFilter(expression).unevaluated == 0
