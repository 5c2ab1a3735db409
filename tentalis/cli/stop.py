"""`tentalis stop`: stops processes of the running local stack."""

from __future__ import annotations

from tentalis.cli.shared.control import WAIT_S, Names, ProcessChange, Wait, carry_out, stopped
from tentalis.cli.shared.options import DryRun, YesOnTerminal
from tentalis.cli.shared.output import Format, OutputFormat


def stop(
    names: Names,
    timeout: Wait = WAIT_S,
    dry_run: DryRun = False,
    yes: YesOnTerminal = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Stops processes of the running local stack until `tentalis start`; the others keep running.

    `tentalis down` stops the whole stack."""
    carry_out(ProcessChange("stop", names, stopped, timeout), output, dry_run=dry_run, yes=yes)
