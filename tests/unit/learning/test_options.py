"""The options of `tentalis learn` that are parsed by hand."""

import pytest

from tentalis.cli.learn import parse_columns, parse_range
from tentalis.cli.shared.errors import CommandError


def test_a_range_is_two_numbers() -> None:
    assert parse_range(None) is None
    assert parse_range("-1.5,10") == (-1.5, 10.0)


@pytest.mark.parametrize("given", ["1", "a,b", "1,2,3", "", "2,1", "1,1", "nan,1"])
def test_another_range_is_refused(given: str) -> None:
    with pytest.raises(CommandError, match="--reward-range"):
        parse_range(given)


def test_columns_are_pairs() -> None:
    assert parse_columns([]) == ()
    assert parse_columns(["question=prompt", "a=b=c"]) == (("question", "prompt"), ("a", "b=c"))


@pytest.mark.parametrize("given", [["question"], ["=prompt"], ["question="], ["a=x", "b=x"], ["a=x", "a=y"]])
def test_other_columns_are_refused(given: list[str]) -> None:
    with pytest.raises(CommandError, match="--column"):
        parse_columns(given)
