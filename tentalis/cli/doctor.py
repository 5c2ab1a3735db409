"""`tentalis doctor`: checks this installation."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table
from tentalis.cli.shared.settings import resolve_settings
from tentalis.service.exit_codes import ExitCode


def doctor(
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
    policy_model: Annotated[
        str | None, typer.Option("--policy-model", help="Check for this model instead of the default one.")
    ] = None,
) -> None:
    """Checks this machine and suggests fixes. Exits with 1 if a requirement is missing."""
    from dataclasses import asdict

    from tentalis.ops.doctor import Level, examine

    findings = examine(resolve_settings(bootstrap), policy_model)
    if output is not OutputFormat.TABLE:
        print_data(output, [asdict(finding) for finding in findings])
    else:
        print_table(("", "check", "found", "what to do"), [(f.level, f.check, f.found, f.remedy) for f in findings])
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(ExitCode.ERROR)
