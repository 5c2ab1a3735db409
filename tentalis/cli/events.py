"""`tentalis events`: the history of the local stack."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tentalis.cli.shared.control import state_home
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table

Since = Annotated[str | None, typer.Option("--since", help="From 2026-01-31T12:00:00Z on, or 10m for ten minutes ago.")]


def since_ms(text: str | None) -> int:
    """Returns the moment of --since in ms since the epoch, 0 if it is not given. Raises CommandError."""
    return 0 if text is None else moment_of("--since", text)


def events(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these processes. Default: all.")
    ] = None,
    since: Since = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the history of the local stack, of earlier runs too: changes of state, exits with the last error, requests.

    -o json prints JSON Lines."""
    from tentalis.local.events import local_time, read_events

    found = [each for each in read_events(state_home(), since_ms(since)) if not names or each.process in names]
    if output is not OutputFormat.TABLE:
        for event in found:
            print_data(output, asdict(event))
        return
    rows = [(local_time(each.at), each.process, each.event, each.restarts, each.pid, each.detail) for each in found]
    print_table(("time", "process", "event", "restarts", "pid", "detail"), rows)
