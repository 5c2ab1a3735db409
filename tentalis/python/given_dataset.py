"""Gives a data set of Python a file: rows are written as JSONL, named by their content."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tentalis.learning.errors import LearnError
from tentalis.learning.options import STDIN
from tentalis.learning.sources import plain

Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A file or folder of prompts, or rows: a list of dicts, a `datasets.Dataset`, any iterable."""
_DIGEST_CHARS = 16


def path_of(dataset: Dataset, folder: Path) -> str:
    """Returns the path of a data set; rows are written into `folder`. Raises LearnError."""
    if isinstance(dataset, str | os.PathLike):
        path = os.fspath(dataset)
        if path == STDIN:
            raise LearnError("`-` is standard input for the command alone: give a path or rows")
        return path
    if isinstance(dataset, Mapping):
        raise LearnError(f"the data set has the splits {', '.join(map(str, dataset))}: give one of them")
    if not isinstance(dataset, Iterable):
        raise LearnError(f"the data set is {type(dataset).__name__}: give a path, a list of dicts, or a `Dataset`")
    return str(_written(dataset, folder))


def _written(rows: Iterable[Any], folder: Path) -> Path:
    """Writes rows as JSONL, one after the other. The same rows have the same file, so that a run continues."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        try:
            for number, row in enumerate(rows, 1):
                line = _line(number, row)
                file.write(line)
                digest.update(line)
        except BaseException:
            Path(file.name).unlink()
            raise
    return Path(file.name).replace(folder / f"{digest.hexdigest()[:_DIGEST_CHARS]}.jsonl")


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise LearnError(
            f"row {number} of the data set is {type(row).__name__}, not a dict: give a list of dicts, such as "
            "[{'prompt': 'What is 2 + 2?', 'answer': '4'}]; of a pandas frame, frame.to_dict('records')"
        )
    try:
        text = json.dumps({str(name): plain(value) for name, value in row.items()}, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"
    except (ValueError, RecursionError) as error:
        raise LearnError(f"row {number} of the data set: {error}") from error
