"""`tentalis restart`: restarts processes of the running local stack."""

from __future__ import annotations

from tentalis.cli.shared.control import WAIT_S, Names, ProcessChange, Wait, carry_out, started
from tentalis.cli.shared.options import DryRun, YesOnTerminal
from tentalis.cli.shared.output import Format, OutputFormat


def restart(
    names: Names,
    timeout: Wait = WAIT_S,
    dry_run: DryRun = False,
    yes: YesOnTerminal = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Restarts processes of the running local stack and waits until they are ready; the others keep running.

    Also starts what has failed, halted or was stopped, and ends the pauses of a crash loop."""
    carry_out(ProcessChange("restart", names, started, timeout), output, dry_run=dry_run, yes=yes)
