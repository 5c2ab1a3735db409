"""Values of reward functions: what counts as a reward, weights and range, and output that is bounded."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from tentalis.rewards.functions.errors import OutOfRange
from tentalis.rewards.functions.output import MAX_SHOWN, BoundedOutput
from tentalis.rewards.functions.reply import FunctionInfo, FunctionValue
from tentalis.rewards.functions.signature import Convention
from tentalis.rewards.functions.total import total
from tentalis.rewards.functions.values import BadValue, Value, listed, numbers, read
from tentalis.rewards.verdict import Verdict


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (0.5, Value(0.5)),
        (True, Value(1.0)),
        (None, Value(None)),
        (np.float32(0.25), Value(0.25)),
        (np.array(0.25), Value(0.25)),
        (Decimal("0.5"), Value(0.5)),
        ({"score": 0.5, "acc": True, "pred": "4"}, Value(0.5, {"acc": 1.0})),
        ({"reward": None, "acc": 0}, Value(None, {"acc": 0.0})),
        ({"format": 0.25, "right": 0.5, "style": None}, Value(0.75, {"format": 0.25, "right": 0.5})),
        (Verdict(0.5, {"right": 1.0}), Value(0.5, {"right": 1.0})),
    ],
)
def test_what_counts_as_a_reward(returned: Any, value: Value) -> None:
    assert read(returned, "verl") == value
    assert read([returned], "trl") == value
    assert read(np.array([0.5]), "trl") == Value(0.5)


@pytest.mark.parametrize(
    ("returned", "convention", "says"),
    [
        (float("nan"), "verl", "returned nan: a reward must be finite"),
        (float("inf"), "verl", "returned inf"),
        ("good", "verifiers", r"returned 'good' \(str\): it must return a number"),
        ([1.0], "verl", r"returned \[1.0\] \(list\)"),
        (np.array([0.1, 0.2]), "verl", "ndarray"),
        ({}, "verl", "an empty dict"),
        ({"format": 1.0, "note": "x"}, "verl", r"'x' \(str\): the part 'note' must be a number, or name the reward"),
        ({"score": "1"}, "verl", "the part 'score' is the reward and must be a number"),
        (1.0, "trl", "must return a list with one reward per completion"),
        ({"score": 1.0}, "trl", "must return a list"),
        ([1.0, 2.0], "trl", "returned 2 rewards for 1 completion"),
        ([], "trl", "returned 0 rewards for 1 completion"),
        ([float("nan")], "trl", "returned nan"),
    ],
)
def test_other_values_are_refused_and_shown(returned: Any, convention: Convention, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        read(returned, convention)


def test_any_iterable_of_rewards_is_read_as_trl_does() -> None:
    assert read(listed((score for score in [0.5]), "trl"), "trl") == Value(0.5)
    assert read(listed(map(float, [1]), "trl"), "trl") == Value(1.0)
    assert read(listed({"a": 0.5}.values(), "trl"), "trl") == Value(0.5)
    with pytest.raises(BadValue, match="returned 2 rewards for 1 completion"):
        read(listed(iter([1.0, 2.0]), "trl"), "trl")
    with pytest.raises(BadValue, match="it must return a number"):
        read(listed(iter([1.0]), "verl"), "verl")


def test_numbers_are_found_among_logged_values() -> None:
    assert numbers({"a": [0.5], "b": "text", "c": 1, "d": float("nan"), "e": [1, 2]}) == {"a": 0.5, "c": 1.0}


def function(name: str) -> FunctionInfo:
    return FunctionInfo(
        name=name,
        target=0,
        convention="verifiers",
        columns=(),
        required=("completion",),
        optional=(),
        everything=False,
        coroutine=False,
        messages=False,
        place="/home/ann/rewards.py:3",
        weight=1.0,
        file="/home/ann/rewards.py",
    )


RIGHT, BRIEF = function("right"), function("brief")


def test_one_function_gives_the_reward_and_its_parts() -> None:
    value = FunctionValue(reward=0.5, parts={"acc": 1.0})
    assert total([RIGHT], [value], [1.0], None) == Verdict(0.5, {"acc": 1.0})
    assert total([RIGHT], [value], [1.0], (0.0, 2.0)) == Verdict(-0.5, {"acc": 1.0, "raw": 0.5})
    assert total([RIGHT], [FunctionValue()], [1.0], None) == Verdict.unknown(**{"missing.right": 1.0})


def test_several_functions_are_weighted_and_an_unknown_one_is_left_out() -> None:
    values = [FunctionValue(reward=1.0, parts={"acc": 1.0}), FunctionValue(reward=-0.5)]
    assert total([RIGHT, BRIEF], values, [1.0, 0.5], None) == Verdict(
        0.75, {"right": 1.0, "right.acc": 1.0, "brief": -0.5}
    )
    left_out = total([RIGHT, BRIEF], [FunctionValue(), FunctionValue(reward=-0.5)], [1.0, 0.5], None)
    assert left_out == Verdict(-0.25, {"missing.right": 1.0, "brief": -0.5})
    assert total([RIGHT, BRIEF], [FunctionValue(), FunctionValue()], [1.0, 1.0], None).reward is None
    twice = total([RIGHT, RIGHT], [FunctionValue(reward=0.5), FunctionValue(reward=0.25)], [1.0, 1.0], None)
    assert twice.components == {"right.1": 0.5, "right.2": 0.25}


@pytest.mark.parametrize(
    ("reward", "limits", "says"),
    [
        (3.0, None, r"^/home/ann/rewards.py:3: right is 3, outside \[-1, 1\]: set range: .* such as range: \[0, 3\]"),
        (-2.5, None, r"right is -2.5, outside \[-1, 1\]: .* such as range: \[-3, 1\]"),
        (3.0, (0.0, 2.0), r"outside \[0, 2\]: .* such as range: \[0, 3\]"),
        (-0.1, (0.0, 2.0), r"such as range: \[-1, 2\]"),
    ],
)
def test_a_value_outside_is_named_with_what_to_set(
    reward: float, limits: tuple[float, float] | None, says: str
) -> None:
    with pytest.raises(OutOfRange, match=says):
        total([RIGHT], [FunctionValue(reward=reward)], [1.0], limits)


def test_rounding_at_the_border_is_not_outside() -> None:
    assert total([RIGHT], [FunctionValue(reward=1.0 + 1e-9)], [1.0], None).reward == 1.0
    assert total([RIGHT], [FunctionValue(reward=0.15)], [1.0], None).reward == 0.15


def test_output_is_shown_by_lines_and_a_flood_is_counted() -> None:
    output = BoundedOutput()
    assert output.feed(b"one\ntw") == ["one"]
    assert output.feed("o\r\n\x1b[31mred \xe4\n".encode()) == ["two", "\ufffd[31mred \xe4"]
    assert output.feed(b"rest") == [] and output.next_call() == ["rest"]
    flood = [line for _ in range(100) for line in output.feed(b"x" * 99 + b"\n")]
    assert MAX_SHOWN - 200 < sum(map(len, flood)) <= MAX_SHOWN
    assert output.next_call() == [f"... and {10_000 - MAX_SHOWN} more bytes, which are not shown"]
    assert output.feed(b"again\n") == ["again"] and output.next_call() == []
