"""The rules against next messages and calls that others wrote (`make bench B=signals` prints the figures)."""

from collections import Counter
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from tentalis.signals import languages
from tentalis.signals.lexicon import Lexicon
from tentalis.signals.phrases import accepts, correction
from tests.bench.signals_set import Case, cases, gives_hint, kappa, predicted, scores, second_labels
from tests.support import ROOT

PAGE = ROOT / "docs" / "concepts" / "signals.md"
CASES = cases()
HELD = [case for case in CASES if not case.seen]
MESSAGES = [case for case in CASES if case.kind == "next"]


def test_the_set_has_what_the_page_says() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert len(MESSAGES) >= 300 and {case.lang for case in MESSAGES} == set(languages.READ)
    assert all(
        min(Counter(case.label for case in MESSAGES if case.lang == lang).values()) >= 15 for lang in languages.READ
    )
    assert all(case.row["source"] and case.row["licence"] in ("Apache-2.0", "MIT") for case in CASES)
    assert {case.row["base"] for case in HELD}.isdisjoint(case.row["base"] for case in CASES if case.seen)


@pytest.mark.parametrize(("label", "precision", "recall"), [(1, 0.9, 0.8), (-1, 0.9, 0.6)], ids=["plus", "minus"])
def test_messages_are_judged_as_the_page_says(label: int, precision: float, recall: float) -> None:
    found = scores([(case.label, predicted(case)) for case in HELD if case.kind == "next"], label)
    assert found["precision"] is not None and found["precision"] >= precision, found
    assert found["recall"] is not None and found["recall"] >= recall, found
    assert f"| {found['precision']:.3f} | {found['recall']:.3f} |" in PAGE.read_text(encoding="utf-8"), found


def test_two_labellers_agree_as_the_page_says() -> None:
    second = second_labels()
    both = [case for case in MESSAGES if case.id in second]
    assert len(both) == len(second) >= 120
    assert set(Counter((case.lang, case.label) for case in both).values()) == {8}, (
        "a stratum is not as large as the others"
    )
    found = kappa([(case.label, second[case.id]) for case in both])
    assert f"kappa is {found:.3f} " in PAGE.read_text(encoding="utf-8"), found
    assert kappa([(1, 0), (0, 1), (-1, 0), (0, -1)]) < 0 < kappa([(1, 1), (0, 0), (-1, 0), (0, 0)]) < 1


def test_side_calls_are_found_and_requests_of_people_are_not() -> None:
    found = scores([(case.label, predicted(case)) for case in CASES if case.kind == "call"], "side")
    assert found == {"precision": 1.0, "recall": 1.0}


def test_hints_are_made_as_the_page_says() -> None:
    found = scores([(case.row["hint"], gives_hint(case)) for case in HELD if case.kind == "next"], True)
    assert f"| {found['precision']:.3f} | {found['recall']:.3f} |" in PAGE.read_text(encoding="utf-8"), found


def test_no_message_counts_for_both() -> None:
    for case in MESSAGES:
        if accepts(case.row["next"]):
            assert correction(case.row["next"]) is None, case.id


def _lexicons() -> list[Lexicon]:
    return [value for value in vars(languages).values() if isinstance(value, Lexicon)]


def _repeats(parsed: Any, inside: bool = False) -> bool:
    """True if an unlimited repetition is inside another repetition: such a pattern can need exponential time."""
    return any(_unlimited(operator, argument, inside) for operator, argument in parsed)


def _unlimited(operator: Any, argument: Any, inside: bool) -> bool:
    if operator in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
        _, most, body = argument
        return (most == _parser.MAXREPEAT and inside) or _repeats(body, inside or most > 1)
    if operator == _parser.SUBPATTERN:
        return _repeats(argument[-1], inside)
    if operator == _parser.BRANCH:
        return any(_repeats(body, inside) for body in argument[1])
    return operator in (_parser.ASSERT, _parser.ASSERT_NOT) and _repeats(argument[1], inside)


def test_no_unlimited_repetition_is_inside_another() -> None:
    assert _repeats(_parser.parse(r"(?:a\w* ){0,3}b"))
    assert not _repeats(_parser.parse(r"^\W*(?:ab )?c\w*"))
    lexicons = _lexicons()
    assert len(lexicons) == 5
    for lexicon in lexicons:
        for name in ("thanks", "praise", "declines", "doubt", "no", "objections", "complaints", "conditions"):
            assert not _repeats(_parser.parse(getattr(lexicon, name).pattern)), (name, lexicon.marks)


def test_a_case_says_its_half_by_its_base_alone() -> None:
    one = CASES[0]
    same = Case(one.kind, "another", one.base, "xx", 0, {})
    assert same.seen == one.seen
