"""Reads hand-written TOML settings."""

import sys
import tomllib
from pathlib import Path
from typing import Any

from tentalis.text.settings_text import settings_text


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
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadToml(f"{where}: not TOML: {error}") from error
    except RecursionError as error:
        raise BadToml(f"{where}: not TOML: nested too deeply") from error
    except ValueError as error:
        digits = sys.get_int_max_str_digits()
        raise BadToml(f"{where}: not TOML: a number of more than {digits} digits") from error
