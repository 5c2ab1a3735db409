"""`tentalis export`: copies a run to files."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached


def export(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    into: Annotated[
        str | None, typer.Option("--into", help="Folder, or s3:// or gs:// URL, to write. Default: RUN.archive.")
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Export although rollouts are missing, and list them.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Exports all that a replay of the run needs, as Avro files named by their sha256. Refuses forged rollouts."""
    from tentalis.storage.location import Location
    from trainer.data.fetch import BadRollouts
    from trainer.replay.archive import BadArchive
    from trainer.replay.recording import CannotReplay
    from trainer.replay.stored_archive import export_to

    with reached(bootstrap) as settings:
        try:
            done = export_to(run, settings, Location.given(into or f"{run}.archive"), allow_missing=allow_missing)
        except (BadArchive, BadRollouts, CannotReplay) as error:
            raise CommandError(str(error)) from error
    if output is not OutputFormat.TABLE:
        print_data(
            output,
            {
                "run_id": done.run_id,
                "folder": str(done.folder),
                "files": done.files,
                "records": done.records,
                "left_out": done.left_out,
            },
        )
        return
    print_table(
        ("record", "records", "bytes", "file"),
        [(entry["record"], entry["records"], entry["bytes"], name) for name, entry in done.files.items()],
    )
    for reason in done.left_out:
        print_text(f"exported without content: {reason}")
    print_text(f"\nTo import the run elsewhere, copy {done.folder} and run: tentalis import {done.folder}")
