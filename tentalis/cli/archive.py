"""`tentalis export` and `tentalis import`: a run from one cluster to another, or to a shelf."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.common import DRIFT, Bootstrap, CommandError, Format, Output, print_json, print_table, reached


def export(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    into: Annotated[Path | None, typer.Option("--into", help="The folder. Default: RUN.archive.")] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Also where rollouts are missing; they are named.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Writes everything a replay of the run needs as Avro files named by their sha256. Forged rollouts are refused."""
    from trainer.archive import export_run
    from trainer.fetch import BadRollouts
    from trainer.recording import CannotReplay

    with reached(bootstrap) as settings:
        try:
            done = export_run(run, settings, into or Path(f"{run}.archive"), allow_missing=allow_missing)
        except (BadRollouts, CannotReplay) as error:
            raise CommandError(str(error)) from error
    if output is Output.JSON:
        print_json(
            {
                "run_id": done.run_id,
                "folder": str(done.folder),
                "files": done.files,
                "records": done.records,
                "left_out": done.left_out,
            }
        )
        return
    print_table(
        ("record", "records", "bytes", "file"),
        [(entry["record"], entry["records"], entry["bytes"], name) for name, entry in done.files.items()],
    )
    for reason in done.left_out:
        print(f"without its content: {reason}")
    print(f"\n{done.folder}: bring it where it shall go, and there: tentalis import {done.folder}")


def import_(
    folder: Annotated[Path, typer.Argument(help="What `tentalis export` wrote.", exists=True, file_okay=False)],
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Puts an exported run onto this log. Everything is checked first; what is there already is not written again."""
    from trainer.archive import BadArchive, Conflict, import_run

    with reached(bootstrap) as settings:
        try:
            done = import_run(folder, settings)
        except BadArchive as error:
            raise CommandError(str(error)) from error
        except Conflict as error:
            raise CommandError(str(error), DRIFT) from error
    if output is Output.JSON:
        print_json(
            {"run_id": done.run_id, "written": done.written, "present": done.present, "forgotten": done.forgotten}
        )
        return
    print_table(
        ("record", "written", "there already"), [(name, n, done.present[name]) for name, n in done.written.items()]
    )
    for key in done.forgotten:
        print(f"forgotten here, not written: {key}")
    print(f"\ntentalis replay {done.run_id}")
