"""`tentalis state`: the state of stream applications."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun, variable_option
from tentalis.cli.shared.output import Format, OutputFormat, show
from tentalis.cli.shared.settings import reached
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

app = typer.Typer(help="State of stream applications.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def state() -> None:
    """State of stream applications."""


@app.command(short_help="Rebuild a lost state from the log.")
def rebuild(
    application: Annotated[str, typer.Argument(help="The application: join.")],
    dry_run: DryRun = False,
    yes: CarryOut = False,
    marker_ttl: Annotated[float, variable_option(variables.MARKER_TTL, "--marker-ttl")] = variables.MARKER_TTL.default,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Folds the committed halves once more and writes the state to the join's changelog; outputs are discarded.

    The join must be stopped. Tasks whose halves have left the log by retention are not in the state."""
    from streams.apps.join.processor import JoinProcessor, limits_of
    from streams.runtime.rebuild import REASON, CannotRebuildState, StateRebuild, state_digest
    from tentalis.kafka.codec import make_codec
    from tentalis.kafka.producer import Publisher

    if application != "join":
        raise CommandError(
            f"the state of {application} cannot be rebuilt from its input alone; that of join can", ExitCode.USAGE
        )
    write, rows = yes and not dry_run, []
    with reached(bootstrap) as settings:
        codec = make_codec(settings)
        work = StateRebuild(settings, JoinProcessor(codec, limits_of(round(1000 * marker_ttl))))
        publisher = Publisher(settings, REASON, codec)
        try:
            work.check_inactive()
            spans = work.spans()
            if write:
                work.begin(spans)
            for partition, span in spans.items():
                rebuilt = asyncio.run(work.partition(partition, span))
                rows.append(
                    {
                        "partition": partition,
                        "from": rebuilt.begin,
                        "to": rebuilt.end,
                        "entries": len(rebuilt.entries),
                        "sha256": state_digest(rebuilt.entries),
                    }
                )
                if write:
                    work.write(rebuilt, publisher)
            if write:
                work.check_inactive()
                work.commit(spans)
        except CannotRebuildState as error:
            raise CommandError(str(error)) from error
    show(output, ("partition", "from", "to", "entries", "sha256"), rows)
    typer.echo("written" if write else "nothing was written: --yes writes this state", err=True)
