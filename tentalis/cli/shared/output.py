"""Output of commands on stdout: tables for people, JSON and YAML for programs. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from tentalis.service.stdout import data
from tentalis.text.timestamps import written

TIMES = ("published", "at", "began", "last_result")
"""Fields of details that hold milliseconds since the epoch."""


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Format = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format, on stdout; logs go to stderr.")]


def print_text(*lines: str) -> None:
    """Prints lines on stdout and flushes them. A command must not use `print`: within it `sys.stdout` is stderr."""
    print(*lines, sep="\n", file=data(), flush=True)


def print_json(value: Any) -> None:
    """Prints one JSON value on one line of stdout and flushes it: several values are JSON Lines."""
    print_text(json.dumps(value, ensure_ascii=False, default=str))


def print_data(output: OutputFormat, value: Any) -> None:
    """Prints one value for programs: as one line of JSON, or as one YAML document. In a stream, each document begins
    with `---`; call `print_data` once for each value."""
    if output is OutputFormat.JSON:
        print_json(value)
        return
    import yaml

    # Through JSON: enums, dates and paths become the same text in both formats.
    plain = json.loads(json.dumps(value, ensure_ascii=False, default=str))
    print_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, explicit_start=True, width=120).rstrip("\n"))


def emitter(output: OutputFormat) -> Callable[[Any], None] | None:
    """Returns a function that prints a value for programs; None for a table."""
    return None if output is OutputFormat.TABLE else partial(print_data, output)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
    return str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints columns aligned with blanks, heads in capitals, as kubectl and rpk do: easy to read and to cut."""
    cells = [
        [name.upper() for name in columns],
        *([_cell(value) for value in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        line = "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True))
        data().write(line.rstrip() + "\n")
    data().flush()


def show(output: OutputFormat, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Prints rows as a table of the named columns, or as one array of objects with all fields."""
    if output is OutputFormat.TABLE:
        print_table(columns, [[row.get(name) for name in columns] for row in rows])
    else:
        print_data(output, rows)


def detail_rows(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flattens nested values to rows named by their path, with times and numbers formatted for people."""
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            rows += detail_rows(inner, f"{prefix}{name}.")
        elif isinstance(inner, list) and all(isinstance(item, Mapping) for item in inner):
            for number, item in enumerate(inner):
                rows += detail_rows(item, f"{prefix}{name}.{number}.")
        elif name in TIMES and inner is not None:
            rows.append((f"{prefix}{name}", written(inner)))
        else:
            rows.append((f"{prefix}{name}", readable(inner)))
    return rows


def readable(value: Any) -> Any:
    """Shortens a number for a table."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or None
    return f"{value:.6g}" if isinstance(value, float) else value


def first_line(text: str) -> str:
    """Returns the first line of a message."""
    return text.splitlines()[0] if text else ""
