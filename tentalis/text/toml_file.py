"""Reads hand-written TOML settings within a bounded time."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from tentalis.text.settings_text import settings_text

MOST_PARTS = 100
"""The most parts of a dotted key. `tomllib` needs time and memory in proportion to their square."""

_OPENED, _LITERAL = r"\"(?:[^\"\\\n]|\\[^\n])*+", r"'[^'\n]*+'"
_PART = rf"(?:[A-Za-z0-9_-]++|{_OPENED}\"|{_LITERAL})[ \t]*+\.[ \t]*+"
# A long key, else a text or a remark, in which nothing is a key. An unfinished text reaches to the end.
_LONG_KEY = re.compile(
    rf"(?P<key>(?<![A-Za-z0-9_.-])(?:{_PART}){{{MOST_PARTS}}})"
    r"|\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+(?:\"\"\"|\Z)|'''(?:[^']|'(?!''))*+(?:'''|\Z)"
    rf"|{_OPENED}\"?|{_LITERAL}|#[^\n]*+",
    re.DOTALL,
)


class BadToml(ValueError):
    """A file without valid settings. The message gives the place of the error, and not its line, which may hold a
    secret."""


def read_table(path: Path) -> dict[str, Any]:
    """Reads the settings in a file. Raises BadToml, which names the file."""
    try:
        text = settings_text(path)
    except ValueError as error:
        raise BadToml(str(error)) from error
    return table_in(text, str(path))


def table_in(text: str, where: str) -> dict[str, Any]:
    """Parses the settings in a text from `where`. Raises BadToml, with `where`."""
    for found in _LONG_KEY.finditer(text):
        if found["key"] is not None:
            lines = text[: found.start()].split("\n")
            place = f"(at line {len(lines)}, column {len(lines[-1]) + 1})"
            raise BadToml(f"{where}: not TOML: a key of more than {MOST_PARTS} parts {place}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadToml(f"{where}: not TOML: {error}") from error
    except RecursionError as error:
        raise BadToml(f"{where}: not TOML: nested too deeply") from error
    except ValueError as error:
        digits = sys.get_int_max_str_digits()
        raise BadToml(f"{where}: not TOML: a number of more than {digits} digits") from error
