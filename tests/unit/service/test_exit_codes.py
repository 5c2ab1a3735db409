"""Exit codes: their tables in the documentation and in `--help`, and the error classes that they belong to."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.service.error_messages import EXIT_CODES, explain
from tentalis.service.exit_codes import ExitCode

ROOT = Path(__file__).parents[3]
TABLE = re.compile(r"^\| exit code \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def documented() -> dict[Path, list[set[int]]]:
    """The codes of every table of exit codes, by page."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        page: [
            {int(code) for row in table.splitlines() for code in row.split("|")[1].split(",")}
            for table in TABLE.findall(page.read_text(encoding="utf-8"))
        ]
        for page in pages
    }


def test_one_page_lists_every_exit_code_and_no_page_lists_others() -> None:
    tables = [codes for found in documented().values() for codes in found]
    assert set(ExitCode) in tables, "no table in README.md or docs/ lists every exit code"
    for codes in tables:
        assert codes <= set(ExitCode)


def test_the_help_lists_every_exit_code_of_an_error() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    listed = re.search(r"Exit codes: (.*?)\. TENTALIS_DEBUG", text)
    assert listed is not None
    shown = dict(entry.split(" ", 1) for entry in listed[1].split(", "))
    assert shown == {str(int(code)): code.summary for code in ExitCode if code < 128}


@pytest.mark.parametrize("name", EXIT_CODES)
def test_each_error_class_with_a_code_exists(name: str) -> None:
    module, _, error = name.rpartition(".")
    found = getattr(import_module(module), error)
    assert explain(found("x")) == ("x", EXIT_CODES[name])
    subclass = type("Subclass", (found,), {})
    assert explain(subclass("x")) == ("x", EXIT_CODES[name])


def test_the_codes_are_stable() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 7, 130, 143]
