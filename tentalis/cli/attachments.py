"""`tentalis attachments`: lists and fetches files that episodes left in the store of attachments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, show
from tentalis.cli.shared.settings import reached

app = typer.Typer(help="Files that episodes left: list, get.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = ("sample", "name", "bytes", "media_type", "sha256", "url")
Task = Annotated[str, typer.Argument(help="Id of the task.")]


@app.command("list", short_help="List the files that the episodes of a task left.")
def list_attachments(task: Task, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists the files that the results of a task name. Without a URL: it was larger than the worker's limit, and is not
    stored."""
    from tentalis.ops.attachments import attached_files

    with reached(bootstrap) as settings:
        rows = [each.row() for each in attached_files(settings, task)]
    show(output, COLUMNS, rows)


@app.command(short_help="Fetch one file, and check its sha256.")
def get(
    task: Task,
    name: Annotated[str, typer.Argument(help="Name of the file, or the beginning of its sha256.")],
    into: Annotated[Path, typer.Option("--into", help="File to write; it must not exist.")],
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Fetches a file from the place that the result names. It is written only if its size and its sha256 are those of
    the result. Needs the credentials of the store."""
    from tentalis.ops.attachments import NoSuchAttachment, attached_files, chosen_file
    from tentalis.storage.attachments import read_attachment

    with reached(bootstrap) as settings:
        files = attached_files(settings, task)
    try:
        found = chosen_file(files, name)
    except NoSuchAttachment as error:
        raise CommandError(f"task {task}: {error}") from error
    content = read_attachment(found)
    try:
        _write_new(into, content)
    except FileExistsError as error:
        raise CommandError(f"{into} exists: name another file with --into") from error
    show(output, ("file", "bytes", "sha256"), [{"file": str(into), "bytes": found.bytes, "sha256": found.sha256}])


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            path.unlink()
            raise
