"""The figures of judge models (`make bench B=judge`), without a model."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.bench import judge_page
from tests.bench.bench_judge import SETTINGS
from tests.bench.judge_page import FOLDER, bare_grade, by_chance, of_label


@pytest.mark.parametrize(
    ("text", "grade"),
    [("1", 1), ("The grade is -1.", -1), ("0 at first, then +1", 1), ("−1", -1), ("10 of 2010, 1.5", None), ("", None)],
)
def test_a_bare_grade_is_the_last_that_stands_alone(text: str, grade: int | None) -> None:
    assert bare_grade(text) == grade


def test_chance_is_what_counting_gives() -> None:
    labelled = {0, 1, 2}
    drawn = list(combinations(range(7), 3))
    for hits in range(4):
        share = sum(len(labelled & set(each)) >= hits for each in drawn) / len(drawn)
        assert by_chance(hits, 3, 3, 7) == pytest.approx(share)


def test_a_judge_that_guesses_right_is_beyond_chance_and_a_silent_one_is_not() -> None:
    labels = [1] * 5 + [0] * 15
    good = of_label([(label, label) for label in labels], 1)
    assert (good["precision"], good["recall"], good["chance"]) == (1.0, 1.0, 0.25)
    assert good["p"] is not None and good["p"] < 0.001
    silent = of_label([(label, None) for label in labels], 1)
    assert (silent["precision"], silent["recall"], silent["p"]) == (None, 0.0, 1.0)


def test_the_page_is_that_of_the_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(judge_page, "FOLDER", tmp_path)
    judge_page.write(SETTINGS.max_tokens, SETTINGS.max_chars)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page
