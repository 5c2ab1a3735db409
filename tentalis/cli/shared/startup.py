"""The first steps of every command: logging, and a check of the names of variables. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tentalis.service.settings_file import AppliedSettings

log = logging.getLogger(__name__)

HOLD = "tentalis.hold"
"""The key under which the context of a process has its metrics port, and the exit codes with which it is held."""
STARTING = frozenset({"demo", "learn", "up", "serve", "worker", "manager", "train"})
"""The commands that start processes: they check every variable first."""


def configure_logging(default: str = "WARNING") -> None:
    """Sends logs to stderr, one line each, at level TENTALIS_LOG. Processes of the stack default to INFO."""
    from tentalis.service import logs

    logs.configure(default)


def profile_first(args: Sequence[str]) -> list[str]:
    """Moves `--profile NAME` to the beginning of a command line, from any place before `--`.

    Raises ValueError: no name follows it, or it stands there twice. `--profile=NAME` takes every name.
    """
    end = args.index("--") if "--" in args else len(args)
    places = [at for at, each in enumerate(args[:end]) if each == "--profile" or each.startswith("--profile=")]
    if not places:
        return list(args)
    if len(places) > 1:
        raise ValueError("--profile is given more than once.")
    place = places[0]
    length = 2 if args[place] == "--profile" else 1
    if place + length > end:
        raise ValueError("--profile needs the name of a profile, and nothing follows it.")
    if length == 2 and args[place + 1].startswith("-"):
        raise ValueError(f"--profile needs the name of a profile, and {args[place + 1]} follows it.")
    return [*args[place : place + length], *args[:place], *args[place + length :]]


@contextmanager
def settings_file(profile: str | None) -> Iterator[AppliedSettings]:
    """Applies the settings file, and configures logging by it. Raises BadSettingsFile, BadVariable."""
    from tentalis.service.settings_file import applied

    with applied(profile) as settings:
        configure_logging()
        for warning in settings.warnings:
            log.warning("%s", warning)
        yield settings


def warn_of_misspelt_variables() -> None:
    """Warns about likely misspelt TENTALIS_* variables."""
    from tentalis.service.environment import misspelt

    for complaint in misspelt(os.environ):
        log.warning("%s", complaint)


def check_namespace() -> None:
    """Refuses a bad namespace: the names of all topics and groups depend on it. Raises BadNamespace."""
    from schemas.namespace import prefix_of

    prefix_of(os.environ)


def hold_if_wanted(ctx: Any, code: int) -> None:
    """Lets a process with a metrics port wait for SIGTERM if it ended with a code of TENTALIS_HOLD."""
    port, codes = ctx.meta.get(HOLD, (None, ()))
    if port is not None and code in codes:
        from tentalis.service.hold import become_held

        become_held(ctx.invoked_subcommand, code, port)


def report_skipped_records() -> None:
    """Logs the records that the command could not decode, if it has read any."""
    # Looked up, not imported: a command that never loaded the module has skipped nothing.
    if (module := sys.modules.get("tentalis.kafka.skipped")) is not None:
        for each in module.ALL:
            each.report()
