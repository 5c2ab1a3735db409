"""`tentalis import`: copies an exported run from files onto another cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode


def import_(
    folder: Annotated[str, typer.Argument(help="Folder, or s3:// or gs:// URL, written by `tentalis export`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every record and write nothing.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Imports an exported run. Checks every record first and skips records that are already on the log."""
    from tentalis.storage.location import Location
    from trainer.replay.archive import BadArchive, ImportConflict, import_run
    from trainer.replay.stored_archive import archive_folder

    place = Location.given(folder)
    if place.folder is not None and not place.folder.is_dir():
        raise CommandError(f"{folder}: no such folder", ExitCode.USAGE)
    with reached(bootstrap) as settings:
        try:
            with archive_folder(place) as local:
                done = import_run(local, settings, dry_run=dry_run)
        except BadArchive as error:
            raise CommandError(str(error)) from error
        except ImportConflict as error:
            raise CommandError(str(error), ExitCode.DRIFT) from error
    if output is not OutputFormat.TABLE:
        print_data(
            output,
            {"run_id": done.run_id, "written": done.written, "present": done.present, "forgotten": done.forgotten},
        )
        return
    print_table(
        ("record", "to write" if dry_run else "written", "already there"),
        [(name, n, done.present[name]) for name, n in done.written.items()],
    )
    for key in done.forgotten:
        print_text(f"not written, because it was forgotten on this log: {key}")
    if dry_run:
        typer.echo("dry run: every record was checked, nothing was written", err=True)
    else:
        print_text(f"\ntentalis replay {done.run_id}")
