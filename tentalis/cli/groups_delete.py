"""`tentalis groups delete`: deletes consumer groups without members, such as those of workers that were replaced."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

COLUMNS = ("group", "application", "state", "partitions", "records")


def delete(
    groups: Annotated[list[str] | None, typer.Argument(help="Names of the groups.", show_default=False)] = None,
    replaced_workers: Annotated[
        bool,
        typer.Option(
            "--replaced-workers", help="All groups of single workers without members: of replaced containers and pods."
        ),
    ] = False,
    force: Annotated[
        list[str] | None,
        typer.Option(
            "--force",
            metavar="GROUP",
            help="Delete GROUP although it is not of a worker: its committed offsets are lost; repeatable.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the groups that would be deleted, with their committed offsets; with --yes, deletes them.

    Refused while a group has members, and for the group of an application other than the worker, unless --force names
    it. A worker that comes back with the same id answers the tasks that name it again: the join takes the first result.
    """
    from tentalis.ops.groups.core import GroupDeletionRefused
    from tentalis.ops.groups.process import delete_groups, planned_deletion
    from tentalis.ops.groups.process import replaced_workers as read_replaced_workers

    if bool(groups) is replaced_workers:
        raise CommandError("name groups, or give --replaced-workers", ExitCode.USAGE)
    if replaced_workers and force:
        raise CommandError("--force is for named groups, not for --replaced-workers", ExitCode.USAGE)
    done = yes and not dry_run
    with reached(bootstrap) as settings:
        try:
            found = planned_deletion(settings, groups, force or ()) if groups else read_replaced_workers(settings)
            names = [lag.group.name for lag in found]
            if done and names:
                delete_groups(settings, names)
        except GroupDeletionRefused as error:
            raise CommandError(str(error)) from error
    rows = [
        {
            "group": lag.group.name,
            "application": lag.application,
            "state": lag.group.state,
            "partitions": sum(each.committed is not None for each in lag.partitions),
            "records": lag.records,
        }
        for lag in found
    ]
    if output is not OutputFormat.TABLE:
        print_data(output, {"deleted": done, "groups": rows})
    else:
        print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    if done:
        typer.echo(f"deleted: {len(rows)} groups with their offsets", err=True)
    else:
        typer.echo(f"nothing was deleted; --yes deletes {len(rows)} groups with their offsets", err=True)
