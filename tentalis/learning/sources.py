"""Reads the rows of a data set as a stream: JSONL, JSON, CSV, TSV, Parquet, or a folder that `datasets` saved."""

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

from tentalis.learning.errors import LearnError
from tentalis.service.packages import how_to_install

_CHUNK = 2**20
_FIELD_BYTES = 2**24
_BATCH_ROWS = 1024
_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a source: its number from 1 (of the line, where the source has lines), and its values or the problem."""

    number: int
    values: Mapping[str, Any] | None
    problem: str = ""


def read_rows(path: Path) -> Iterator[SourceRow]:
    """Returns the rows of a source, by the ending of its name. A row that cannot be read has a problem.

    Raises LearnError if the source as a whole cannot be read, at the latest where reading cannot continue.
    """
    if not path.exists():
        raise LearnError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _saved_dataset(path)
    if not path.is_file():
        raise LearnError(
            f"{path} is a pipe or a device, which can be read once only: pipe JSONL into the command with -"
        )
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise LearnError(
            f"{path}: the ending {path.suffix or '(none)'} is not known. Prompts are read from {', '.join(READERS)} "
            "and from folders that `datasets` saved"
        )
    return reader(path)


def line_word(path: Path) -> str:
    """Returns the word for the numbers of the rows of a source."""
    return "row" if path.is_dir() or path.suffix.lower() in (".parquet", ".json") else "line"


class _RowDecoder:
    """Decodes JSON and collects what is wrong with it although it can be read: NaN, Infinity, a name twice."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._constant, object_pairs_hook=self._object)

    def decode(self, text: str, at: int = 0) -> tuple[Any, int]:
        """Returns the value that begins at a place, and its end. Raises ValueError, RecursionError."""
        self._problems.clear()
        return self._decoder.raw_decode(text, at)

    def row(self, number: int, value: Any) -> SourceRow:
        """Returns the row of the value that was decoded last."""
        if self._problems:
            return SourceRow(number, None, f"not JSON: {self._problems[0]}")
        if not isinstance(value, dict):
            return SourceRow(number, None, f"not a JSON object but {type(value).__name__}")
        return SourceRow(number, value)

    def _constant(self, name: str) -> None:
        self._problems.append(f"{name} is not a JSON number")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self._problems.append(f"an object has the name {twice!r} twice")
        return made


def _jsonl(path: Path) -> Iterator[SourceRow]:
    decoder = _RowDecoder()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                _refuse_utf16(path, line)
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield _json_row(decoder, number, text)


def _json_row(decoder: _RowDecoder, number: int, line: bytes) -> SourceRow:
    try:
        text = line.decode("utf-8").strip()
        value, end = decoder.decode(text)
        if end < len(text):
            return SourceRow(number, None, f"not JSON: more text after the value: {text[end : end + 20]!r}")
    except (ValueError, RecursionError) as error:
        return SourceRow(number, None, f"not JSON: {error}")
    return decoder.row(number, value)


def _refuse_utf16(path: Path, begin: bytes) -> None:
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise LearnError(f"{path}: not UTF-8 but UTF-16. Save the file as UTF-8")


def _json(path: Path) -> Iterator[SourceRow]:
    """Reads an array of objects, element by element; or lines of objects, which some tools name `.json` too."""
    with path.open("rb") as file:
        begin = file.read(_CHUNK)
    _refuse_utf16(path, begin)
    text = begin.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.partition(b"\n")[0].strip() == b"{":
        raise LearnError(f"{path} is one JSON object over several lines: an array of objects, or JSONL, is needed")
    return _json_array(path) if text.startswith(b"[") else _jsonl(path)


def _json_array(path: Path) -> Iterator[SourceRow]:
    decoder = _RowDecoder()
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            text, at, ended = file.read(_CHUNK), 0, False
            at = _end(_SPACE, text, 0) + 1  # behind the bracket
            while True:
                at = _end(_SEPARATOR, text, at)
                value: Any = None
                problem = "the array does not end"
                complete = False
                if at < len(text) and text[at] == "]":
                    _refuse_more(path, number, text[at + 1 :], file)
                    return
                if at < len(text):
                    try:
                        value, end = decoder.decode(text, at)
                        complete = ended or end < len(text)
                    except (ValueError, RecursionError) as error:
                        problem = f"not JSON: {error}"
                if complete:
                    number, at = number + 1, end
                    yield decoder.row(number, value)
                    continue
                if ended:
                    raise LearnError(f"{path}, row {number + 1}: {problem}. Correct the file, or convert it to JSONL")
                more = file.read(max(_CHUNK, len(text)))
                text, at, ended = text[at:] + more, 0, not more
    except UnicodeDecodeError as error:
        raise LearnError(f"{path}, after row {number}: not UTF-8: {error}. Save the file as UTF-8") from error


def _refuse_more(path: Path, number: int, rest: str, file: TextIO) -> None:
    """Raises LearnError if more than white space follows the array: a second array would be lost."""
    while True:
        if rest.strip():
            raise LearnError(
                f"{path}, after row {number}: the array ends, and more follows: {rest.strip()[:20]!r}. Make one array "
                "of it, or convert it to JSONL"
            )
        rest = file.read(_CHUNK)
        if not rest:
            return


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _csv(path: Path) -> Iterator[SourceRow]:
    return _separated(path, ",")


def _tsv(path: Path) -> Iterator[SourceRow]:
    return _separated(path, "\t")


def _separated(path: Path, separator: str) -> Iterator[SourceRow]:
    csv.field_size_limit(_FIELD_BYTES)
    begun = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            try:
                header = next(reader, [])
            except csv.Error as error:
                raise LearnError(f"{path}, line 1: the header is not CSV: {error}. Correct it") from error
            if not header or len({*header}) != len(header):
                raise LearnError(f"{path}, line 1: a header with one name per column is needed, not {header}")
            while True:
                begun = reader.line_num + 1
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield SourceRow(begun, None, f"not CSV: {error}")
                    continue
                if len(row) == len(header):
                    yield SourceRow(begun, dict(zip(header, row, strict=True)))
                elif row:
                    yield SourceRow(begun, None, f"{len(row)} fields, but the header has {len(header)}")
    except UnicodeDecodeError as error:
        raise LearnError(f"{path}, at or after line {begun}: not UTF-8: {error}. Save the file as UTF-8") from error


def _parquet(path: Path) -> Iterator[SourceRow]:
    import duckdb

    literal = re.sub(r"([*?\[])", r"[\1]", str(path))  # DuckDB takes a name as a pattern
    number = 0
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": "false", "threads": "1"}) as connection:
            cursor = connection.execute("SELECT * FROM read_parquet(?)", [literal])
            names = [str(column[0]) for column in cursor.description]
            while rows := cursor.fetchmany(_BATCH_ROWS):
                for row in rows:
                    number += 1
                    yield _plain_row(number, dict(zip(names, row, strict=True)))
    except duckdb.Error as error:
        raise LearnError(f"{path}, after row {number}: not a readable Parquet file: {error}") from error


def _saved_dataset(path: Path) -> Iterator[SourceRow]:
    """Reads a folder that `datasets` saved: its `state.json` lists Arrow files in the stream format."""
    if (path / "dataset_dict.json").is_file():
        splits = _strings(path / "dataset_dict.json", lambda described: described["splits"])
        raise LearnError(f"{path} has the splits {', '.join(splits)}: name one of them, such as {path / splits[0]}")
    if not (path / "state.json").is_file():
        raise LearnError(f"{path} is not a folder that `Dataset.save_to_disk` saved: it has no state.json")
    files = _strings(path / "state.json", lambda state: [each["filename"] for each in state["_data_files"]])
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError as error:
        raise LearnError(
            f"{path}: reading Arrow files needs pyarrow: {how_to_install('datasets')}, or save the data set as Parquet "
            "(`dataset.to_parquet('prompts.parquet')`)"
        ) from error
    return _arrow([path / file for file in files], pyarrow)


def _strings(file: Path, pick: Callable[[Any], Any]) -> list[str]:
    """Returns the names that a file of `datasets` lists. Raises LearnError if it lists none."""
    try:
        found = [str(each) for each in pick(json.loads(file.read_text(encoding="utf-8")))]
    except (ValueError, KeyError, TypeError) as error:
        raise LearnError(f"{file} is damaged: {type(error).__name__}: {error}. Save the data set again") from error
    if not found:
        raise LearnError(f"{file} lists nothing: save a data set that has rows")
    return found


def _arrow(files: list[Path], pyarrow: Any) -> Iterator[SourceRow]:
    number = 0
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as batches:
                for batch in batches:
                    for row in batch.to_pylist():
                        number += 1
                        yield _plain_row(number, row)
        except (pyarrow.ArrowException, OSError) as error:
            raise LearnError(f"{file}, after row {number}: not a readable Arrow file: {error}") from error


def _plain_row(number: int, row: Mapping[str, Any]) -> SourceRow:
    try:
        return SourceRow(number, {name: plain(value) for name, value in row.items()})
    except ValueError as error:
        return SourceRow(number, None, str(error))


def plain(value: Any) -> Any:
    """Returns a value of a column as JSON has it: dates as ISO text, NaN as null. Raises ValueError."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() | Decimal():
            number = int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else float(value)
            if isinstance(number, float) and not math.isfinite(number):
                if math.isnan(number):
                    return None
                raise ValueError(f"{number} is not a JSON number")
            return number
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case UUID():
            return str(value)
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
    if isinstance(value, bytes | bytearray | io.IOBase):
        raise ValueError("a column holds bytes, which JSON does not have: remove the column")
    raise ValueError(f"a column holds a {type(value).__name__}, which JSON does not have: remove the column")


READERS: Mapping[str, Callable[[Path], Iterator[SourceRow]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
"""The reader of each ending."""
