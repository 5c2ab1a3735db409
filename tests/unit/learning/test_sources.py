"""The readers of prompts: every format gives the same rows, and a bad row is named by its line."""

import json
import os
import sys
import tracemalloc
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.learning.errors import LearnError
from tentalis.learning.sources import SourceRow, plain, read_rows

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=5)


def rows_of(path: Path, text: str | bytes) -> list[SourceRow]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_rows(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@given(rows=ROWS, indent=st.sampled_from([None, 1]))
def test_an_array_and_lines_give_the_same_rows(folder: Path, rows: list[dict[str, Any]], indent: int | None) -> None:
    lines = rows_of(folder / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    array = rows_of(folder / "a.json", json.dumps(rows, indent=indent, ensure_ascii=False))
    assert [row.values for row in lines] == rows
    assert array == lines
    assert [row.number for row in lines] == list(range(1, len(rows) + 1))


def test_an_array_longer_than_what_is_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tentalis.learning.sources._CHUNK", 3)
    rows = [{"prompt": "a" * size, "n": [size, {"x": "]"}]} for size in range(12)]
    assert [row.values for row in rows_of(folder / "long.json", "  " + json.dumps(rows))] == rows
    cut = rows_of(folder / "cut.json", '[12345, {"a": 1}]')
    assert [(row.number, row.values) for row in cut] == [(1, None), (2, {"a": 1})], "a number is not two numbers"


def test_lines_in_a_file_named_json_are_read_as_lines(folder: Path) -> None:
    assert [row.values for row in rows_of(folder / "l.json", '{"prompt": "a"}\n{"prompt": "b"}\n')] == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]


def test_bad_lines_are_named_and_the_others_read(folder: Path) -> None:
    rows = rows_of(folder / "bad.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\n{"a": NaN}\n\xff\xfe\n{"a": 2}')
    assert [(row.number, row.values) for row in rows] == [
        (1, {"a": 1}),
        (3, None),
        (4, None),
        (5, None),
        (6, None),
        (7, {"a": 2}),
    ]
    assert "not a JSON object but list" in rows[2].problem and "NaN is not" in rows[3].problem


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1}', '[{"a": 1}, nonsense]'])
def test_an_array_that_breaks_off_is_an_error_with_its_row(folder: Path, text: str) -> None:
    with pytest.raises(LearnError, match=r"broken\.json, row 2: .* convert it to JSONL"):
        rows_of(folder / "broken.json", text)


def test_rows_that_can_be_read_but_are_ambiguous_are_named(folder: Path) -> None:
    array = rows_of(folder / "odd.json", '[{"a": NaN}, {"a": 1, "a": 2}, {"a": 3}]')
    lines = rows_of(folder / "odd.jsonl", '{"a": NaN}\n{"a": 1, "a": 2}\n{"a": 3}\n')
    assert (
        array
        == lines
        == [
            SourceRow(1, None, "not JSON: NaN is not a JSON number"),
            SourceRow(2, None, "not JSON: an object has the name 'a' twice"),
            SourceRow(3, {"a": 3}),
        ]
    )
    (row,) = rows_of(folder / "two.jsonl", '{"a": 1} {"a": 2}\n')
    assert row.values is None and "more text after the value" in row.problem


def test_nothing_behind_an_array_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(rows_of(folder / "arrays.json", '[{"a": 1}]\n \n')) == 1
    monkeypatch.setattr("tentalis.learning.sources._CHUNK", 3)
    for more in ('[{"a": 1}]\n[{"a": 2}]', '[{"a": 1}]          \n{"a": 2}'):
        with pytest.raises(LearnError, match=r"arrays\.json, after row 1: the array ends, and more follows"):
            rows_of(folder / "arrays.json", more)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("u.jsonl", '{"a": 1}\n'.encode("utf-16"), "not UTF-8 but UTF-16. Save the file as UTF-8"),
        ("u.json", '[{"a": 1}]'.encode("utf-16"), "not UTF-8 but UTF-16"),
        ("u.csv", "a,b\n".encode("utf-16"), "not UTF-8"),
        ("o.json", b'{\n "data": [{"a": 1}]\n}', "is one JSON object over several lines"),
        ("h.csv", b'"a,b\n1,2\n', "line 1: the header is not CSV: unexpected end of data"),
    ],
)
def test_a_file_of_another_form_is_an_error_that_names_it(folder: Path, name: str, data: bytes, says: str) -> None:
    with pytest.raises(LearnError, match=f"{name}.*{says}"):
        rows_of(folder / name, data)


def test_a_pipe_is_refused_because_it_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(LearnError, match=r"p\.jsonl is a pipe or a device"):
        read_rows(tmp_path / "p.jsonl")


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"splits": [], "_data_files": []}', '{"splits": 1, "_data_files": [1]}']
)
def test_a_damaged_folder_of_datasets_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(LearnError, match=f"{name} (is damaged|lists nothing)"):
        read_rows(tmp_path)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_separated_values_keep_the_line_where_a_record_begins(folder: Path, ending: str, separator: str) -> None:
    text = 'prompt,answer\n"two\nlines, ""so""",1\nshort\n\nlast,\n'.replace(",", separator)
    rows = rows_of(folder / f"s.{ending}", text)
    assert rows == [
        SourceRow(2, {"prompt": f'two\nlines{separator} "so"', "answer": "1"}),
        SourceRow(4, None, "1 fields, but the header has 2"),
        SourceRow(6, {"prompt": "last", "answer": ""}),
    ]


def test_a_header_with_a_name_twice_is_refused(folder: Path) -> None:
    with pytest.raises(LearnError, match="line 1: a header with one name per column"):
        rows_of(folder / "twice.csv", "a,a\n1,2\n")


def test_parquet_values_become_json(folder: Path) -> None:
    path = folder / "odd[1]*.parquet"  # DuckDB takes these signs as a pattern
    duckdb.sql(
        "SELECT 'hi' AS prompt, {'role': 'user', 'n': [1, 2]} AS info, DATE '2024-01-02' AS day, "
        "1.50::DECIMAL(4,2) AS price, 'nan'::DOUBLE AS nothing UNION ALL SELECT 'two', NULL, NULL, 2, 3.5"
    ).write_parquet(str(folder / "plain.parquet"))
    (folder / "plain.parquet").rename(path)
    (folder / "odd1.parquet").write_bytes(b"another file, which the pattern would match")
    rows = list(read_rows(path))
    assert [row.values for row in rows] == [
        {"prompt": "hi", "info": {"role": "user", "n": [1, 2]}, "day": "2024-01-02", "price": 1.5, "nothing": None},
        {"prompt": "two", "info": None, "day": None, "price": 2, "nothing": 3.5},
    ]


def test_bytes_in_a_parquet_file_make_their_row_unusable(folder: Path) -> None:
    duckdb.sql("SELECT 'x' AS prompt, 'ab'::BLOB AS image").write_parquet(str(folder / "blob.parquet"))
    (row,) = read_rows(folder / "blob.parquet")
    assert row.values is None and "bytes" in row.problem


def test_files_that_are_no_data_are_named(folder: Path) -> None:
    (folder / "no.parquet").write_bytes(b"no parquet")
    with pytest.raises(LearnError, match=r"no\.parquet, after row 0: not a readable Parquet file"):
        list(read_rows(folder / "no.parquet"))
    with pytest.raises(LearnError, match="there is no such file"):
        read_rows(folder / "missing.jsonl")
    (folder / "x.txt").touch()
    with pytest.raises(LearnError, match=r"\.txt is not known.*\.jsonl"):
        read_rows(folder / "x.txt")
    with pytest.raises(LearnError, match=r"no state\.json"):
        read_rows(folder)


def saved(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """Saves rows with `datasets`, in two Arrow files."""
    from datasets import Dataset  # takes seconds

    Dataset.from_list(rows).save_to_disk(str(folder), num_shards=2)
    files = sorted(folder.glob("*.arrow"))
    assert len(files) == 2
    return files


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": str(n)}], "answer": n, "day": date(2026, 1, n + 1)} for n in range(5)
    ]
    saved(tmp_path / "set", rows)
    read = list(read_rows(tmp_path / "set"))
    assert [row.values for row in read] == [row | {"day": f"2026-01-0{n + 1}"} for n, row in enumerate(rows)]
    assert [row.number for row in read] == [1, 2, 3, 4, 5]


def test_a_damaged_arrow_file_is_named_with_the_row_before_it(tmp_path: Path) -> None:
    _, second = saved(tmp_path / "set", [{"prompt": str(n)} for n in range(5)])
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(LearnError, match=f"{second.name}, after row 3: not a readable Arrow file"):
        list(read_rows(tmp_path / "set"))


def test_a_folder_with_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    with pytest.raises(LearnError, match=f"splits train, test.*{tmp_path}/train"):
        read_rows(tmp_path)


def test_without_pyarrow_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}', encoding="utf-8")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LearnError, match=r"pip install '\.\[datasets\]' in a checkout"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Decimal("3"), 3),
        (Decimal("2.5"), 2.5),
        (float("nan"), None),
        (date(2024, 1, 2), "2024-01-02"),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        ({1: (True, None)}, {"1": [True, None]}),
    ],
)
def test_values_as_json_has_them(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


@pytest.mark.parametrize("value", [float("inf"), b"x", {1, 2}])
def test_values_that_json_does_not_have(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON"):
        plain(value)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_large_file_is_not_loaded(folder: Path, ending: str) -> None:
    text = "x" * 2000
    row = f"{text},1\n" if ending == "csv" else json.dumps({"prompt": text}) + ("\n" if ending == "jsonl" else ",")
    head, tail = {"csv": ("prompt,n\n", ""), "jsonl": ("", ""), "json": ("[", '{"prompt": ""}]')}[ending]
    path = folder / f"large.{ending}"
    path.write_text(head + row * 10_000 + tail, encoding="utf-8")
    tracemalloc.start()
    count = sum(1 for _ in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count >= 10_000
    assert peak < path.stat().st_size / 2
