"""Checks the values of all variables, files that they name included, before a command starts processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tentalis.cli.shared.errors import CommandError
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.security import BadSecurity
from tentalis.service.settings import Settings
from tentalis.service.variable import BadVariable, Variable


def _marker_ttl(seconds: float) -> None:
    from streams.apps.join.processor import limits_of

    limits_of(round(1000 * seconds))


def _signals(text: str) -> None:
    from tentalis.signals import names_in

    names_in(text)


def _scorers(path: Path) -> None:
    from tentalis.rewards.scorer_file import BadScorers, name_scorers

    try:
        name_scorers(path)
    except BadScorers as error:
        raise ValueError(str(error)) from error


def _environments(path: Path) -> None:
    from tentalis.rewards.registry import use_environments

    use_environments(path)


def _hinters(path: Path) -> None:
    from tentalis.opd.config import BadHinters, load_hinters

    try:
        load_hinters(path)
    except BadHinters as error:
        raise ValueError(str(error)) from error


def _keys(path: Path) -> None:
    if not path.is_file():
        raise ValueError("no such file; `tentalis keys create` makes it" if not path.exists() else "not a file")


def _data(path: Path) -> None:
    if not path.is_dir():
        raise ValueError("no such folder" if not path.exists() else "not a folder")


# Checks that need more than the value: limits of an application, or the content of a file. Each raises ValueError.
_FURTHER: Mapping[Variable[Any], Callable[[Any], None]] = {
    variables.MARKER_TTL: _marker_ttl,
    variables.DATA: _data,
    variables.KEYS: _keys,
    variables.SIGNALS: _signals,
    variables.SCORERS: _scorers,
    variables.HINTERS: _hinters,
    variables.ENVIRONMENT_FILE: _environments,
}


def variable_problems(env: Mapping[str, str] | None = None) -> list[str]:
    """Returns the problems of an environment's variables, each as a message; empty if every process can use them."""
    given = os.environ if env is None else env
    found = variables.problems(given)
    if not found:
        try:
            Settings.from_env(given)
        except BadSecurity as error:
            found.append(str(error))
    for variable, check in _FURTHER.items():
        if text := given.get(variable.name):
            try:
                check(variable.parse(text))
            except BadVariable:
                continue  # found above
            except ValueError as error:
                found.append(f"{variable.name}={variable.shown(text)}: {error}")
    return found


def refuse_bad_variables() -> None:
    """Raises CommandError, which names every variable with a value that a process cannot use."""
    if found := variable_problems():
        raise CommandError(
            "\n".join(found) + "\nNothing was started. `tentalis config list` shows every setting", ExitCode.USAGE
        )
