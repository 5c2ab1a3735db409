"""`tentalis start`: starts processes of the running local stack."""

from __future__ import annotations

from tentalis.cli.shared.control import WAIT_S, Names, ProcessChange, Wait, carry_out, started
from tentalis.cli.shared.options import DryRun
from tentalis.cli.shared.output import Format, OutputFormat


def start(names: Names, timeout: Wait = WAIT_S, dry_run: DryRun = False, output: Format = OutputFormat.TABLE) -> None:
    """Starts processes of the running local stack that do not run, and waits until they are ready."""
    carry_out(ProcessChange("start", names, started, timeout, interrupts=False), output, dry_run=dry_run)
