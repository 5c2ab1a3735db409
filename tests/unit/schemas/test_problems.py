"""The errors of pydantic, in words."""

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from schemas.problems import MOST_PROBLEMS, problems


class _Inner(BaseModel):
    n: int


class _Data(BaseModel):
    inner: _Inner
    rows: list[int] = []
    even: int = 0

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


def found(data: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        _Data.model_validate(data)
    return caught.value


def test_each_problem_has_its_place_and_none_what_was_given() -> None:
    text = problems(found({"inner": {"n": "s3cret"}, "even": 7}), "file")
    assert text.startswith("inner.n: Input should be a valid integer")
    assert text.endswith("; even: must be even")
    assert "s3cret" not in text and "7" not in text


def test_what_is_wrong_with_the_whole_is_said_of_it() -> None:
    assert problems(found([1]), "file").startswith("file: ")


def test_parts_that_nobody_wrote_are_left_out() -> None:
    wrong = [{"loc": ("body", "rule", "n"), "msg": "no"}, {"loc": ("body",), "msg": "never"}]
    assert problems(wrong, "body", unsaid=("body", "rule")) == "n: no; body: never"


def test_many_are_counted() -> None:
    many = found({"inner": {"n": 1}, "rows": ["x"] * (MOST_PROBLEMS + 1_000)})
    text = problems(many, "file")
    assert f"rows.{MOST_PROBLEMS - 1}: " in text and f"rows.{MOST_PROBLEMS}: " not in text
    assert text.endswith("; and 1,000 more")
