"""Reads the file of `--scorers`, for scoring and the gateway."""

from __future__ import annotations

from pathlib import Path

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.startup import configure_logging
from tentalis.service.exit_codes import ExitCode


def register_scorers(path: Path, *, names_only: bool = False) -> None:
    """Registers the judges and scorers of a file; with `names_only`, only their names. Raises CommandError."""
    configure_logging("INFO")
    from tentalis.rewards.scorer_file import BadScorers, load_scorers, name_scorers

    try:
        name_scorers(path) if names_only else load_scorers(path)
    except BadScorers as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
