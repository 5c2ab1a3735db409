"""`tentalis log-level`: changes the log level of running processes."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.control import ask_stack
from tentalis.cli.shared.options import DryRun
from tentalis.cli.shared.output import Format, OutputFormat, print_data


def log_level(
    name: Annotated[str, typer.Argument(help="A process, as `tentalis status` names it.")],
    level: Annotated[str, typer.Argument(help="DEBUG, INFO, WARNING or ERROR; DEFAULT: as at the start.")],
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Changes the log level of a process of the local stack within a second, until the stack stops.

    TENTALIS_LOG is the level of all processes at their start."""
    if dry_run:
        ask_stack("status", [name])
    else:
        ask_stack("log-level", [name], level.upper())
    if output is not OutputFormat.TABLE:
        print_data(output, {"process": name, "level": level.upper(), "changed": not dry_run})
    typer.echo(f"{name}: {'would be ' if dry_run else ''}{level.upper()}", err=True)
