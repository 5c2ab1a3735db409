"""`tentalis down`: stops the local stack."""

from __future__ import annotations

import typer

from tentalis.cli.shared.options import DryRun, YesOnTerminal, ask_on_terminal
from tentalis.cli.shared.output import Format, OutputFormat, print_data
from tentalis.cli.shared.settings import resolve_settings


def down(dry_run: DryRun = False, yes: YesOnTerminal = False, output: Format = OutputFormat.TABLE) -> None:
    """Stops the local stack cleanly and keeps its data."""
    from tentalis.local.state import StateDir, request_stop

    home = resolve_settings(join_stack=False).home
    pid = StateDir(home).holder()
    if pid is not None and not dry_run:
        if not yes:
            ask_on_terminal(f"Stop the stack in {home} (process {pid})?")
        pid = request_stop(home)
    if output is not OutputFormat.TABLE:
        print_data(output, {"home": str(home), "pid": pid, "stopped": pid is not None and not dry_run})
    verb = "would stop" if dry_run else "stopped"
    typer.echo(f"no stack runs in {home}" if pid is None else f"{verb} the stack in {home} (process {pid})", err=True)
