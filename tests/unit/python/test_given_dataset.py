"""A data set of Python has a file: rows as JSONL, named by their content."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tentalis.learning.errors import LearnError
from tentalis.python.given_dataset import path_of


def test_rows_are_written_once_in_their_order(tmp_path: Path) -> None:
    rows = [{"prompt": "ä", "answer": 1.0, "on": date(2026, 1, 2)}, {"prompt": "b", "answer": float("nan"), "on": None}]
    path = path_of(rows, tmp_path)
    assert [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()] == [
        {"prompt": "ä", "answer": 1.0, "on": "2026-01-02"},
        {"prompt": "b", "answer": None, "on": None},
    ]
    assert path_of(iter(rows), tmp_path) == path != path_of(rows[:1], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dataset_of_datasets_gives_its_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict  # takes seconds

    rows = [{"prompt": [{"role": "user", "content": "ä"}], "answer": 1}, {"prompt": [], "answer": None}]
    path = path_of(Dataset.from_list(rows), tmp_path)
    assert [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()] == rows
    with pytest.raises(LearnError, match="has the splits train, test: give one"):
        path_of(DatasetDict({name: Dataset.from_list(rows) for name in ("train", "test")}), tmp_path)


def test_a_path_stays_as_it_is(tmp_path: Path) -> None:
    assert path_of(tmp_path / "p.jsonl", tmp_path) == str(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("-", "standard input"),
        ({"train": [], "test": []}, "has the splits train, test: give one"),
        (3, "the data set is int"),
        ([{"prompt": "a"}, "b"], r"row 2 of the data set is str, .*to_dict\('records'\)"),
        ([{"prompt": b"a"}], "row 1 of the data set: a column holds bytes"),
    ],
)
def test_what_is_no_data_set_is_refused(dataset: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(LearnError, match=words):
        path_of(dataset, tmp_path)
    assert not list(tmp_path.iterdir())
