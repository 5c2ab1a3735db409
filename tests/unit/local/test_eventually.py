"""The helper with which tests wait."""

import pytest

from tests.support.kafka_fixture import eventually


def test_it_returns_the_first_true_result() -> None:
    results = iter([0, "", None, "done", "later"])
    assert eventually(lambda: next(results), interval=0.0) == "done"


def test_it_tells_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match=r"no records came \(waited 0 s; last result: \[\]\)"):
        eventually(lambda: [], 0, message="no records came")


def test_a_failed_assertion_is_tried_again_and_other_errors_are_not() -> None:
    seen: list[int] = []

    def check() -> bool:
        seen.append(1)
        assert len(seen) == 3, f"seen {len(seen)}"
        return True

    assert eventually(check, interval=0.0)
    seen.clear()
    with pytest.raises(AssertionError, match="seen 1"):
        eventually(check, 0)
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0)
