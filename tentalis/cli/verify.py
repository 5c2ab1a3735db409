"""`tentalis verify`: checks the records of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode
from tentalis.text.shorten import shortened


def verify(
    run: Annotated[str, typer.Argument(help="Id of the run, as in its tasks.")],
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for open tasks to close.")] = 0.0,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Count open tasks, but do not report them as problems.")
    ] = False,
    feedback_horizon: Annotated[
        float,
        typer.Option("--feedback-horizon", min=0.0, help="Value in seconds that scoring and hinting run with."),
    ] = 3600.0,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Checks that no record of a run is lost or duplicated and no answers are mixed. Exits with 1 on problems."""
    from tentalis.ops.verify import verify as verify_run

    with reached(bootstrap) as settings:
        report = verify_run(
            settings,
            run,
            wait=wait,
            allow_open=allow_open,
            feedback_horizon_ms=round(1000 * feedback_horizon),
        )
    if output is not OutputFormat.TABLE:
        print_data(output, report.as_dict())
    else:
        print_table(("what", "count"), report.counts())
        if report.unreadable:
            print_text("\nskipped, not decodable:", *shortened(report.unreadable))
        if report.problems:
            print_text()
            print_table(("rule", "where", "problem"), [(p.rule, p.where, p.message) for p in report.problems])
        number = len(report.problems)
        print_text(f"\n{number or 'no'} problem{'' if number == 1 else 's'}")
    if report.problems:
        raise typer.Exit(ExitCode.ERROR)
