"""`tentalis logs`: the logs of the local stack's processes."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Annotated

import typer

from tentalis.cli.events import Since, since_ms
from tentalis.cli.shared.control import state_home
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text
from tentalis.service.exit_codes import ExitCode

_POLL_S = 0.3


def logs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Processes. Default: all.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines, until Ctrl-C.")] = False,
    since: Since = None,
    level: Annotated[
        str, typer.Option("--level", help="Only lines at this level or above: DEBUG, INFO, WARNING, ERROR.")
    ] = "DEBUG",
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the logs of processes of the local stack, merged by time, also of a stack that does not run.

    A line without its own level belongs to the line before it; a traceback is an error. --follow without names also
    shows processes that are started later.
    """
    from tentalis.local.log_reading import LogFile, LogLine, merged, wanted

    numbers = logging.getLevelNamesMapping()
    if level.upper() not in numbers:
        raise CommandError(f"--level {level} is not a log level; use DEBUG, INFO, WARNING or ERROR", ExitCode.USAGE)
    folder = state_home() / "logs"
    known = sorted(file.stem for file in folder.glob("*.log"))
    chosen = list(dict.fromkeys(names)) if names else known
    if unknown := [name for name in chosen if name not in known]:
        raise CommandError(f"{folder} has no log of {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    files = {name: LogFile(name, folder / f"{name}.log") for name in chosen}
    shown = wanted(since_ms(since), numbers[level.upper()])

    def show(line: LogLine) -> None:
        if output is not OutputFormat.TABLE:
            print_data(output, {**asdict(line), "level": logging.getLevelName(line.level)})
        else:
            width = max(map(len, files))
            print_text(line.text if len(files) == 1 else f"{line.process:{width}} | {line.text}")

    for line in filter(shown, merged([file.past() for file in files.values()])):
        show(line)
    while follow:
        time.sleep(_POLL_S)
        if not names:  # a process may have been started since
            for file in sorted(folder.glob("*.log")):
                files.setdefault(file.stem, LogFile(file.stem, file))
        for line in filter(shown, merged([file.new() for file in files.values()])):
            show(line)
