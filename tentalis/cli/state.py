"""`tentalis state`: the state of stream applications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun, variable_option
from tentalis.cli.shared.output import Format, OutputFormat, show
from tentalis.cli.shared.settings import reached
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from streams.apps.join.halves_before import TasksLacking

WAYS_ON = (
    "What to do: restore the halves from a backup of the topic; or continue without them with --accept-loss, which "
    "writes what is given up to tentalis.audit.v1. Tasks without a half in the state get no outcome, and "
    "`tentalis verify` counts them as given up; samples whose half is gone expire (docs/operations/lost-topics.md)"
)

app = typer.Typer(help="State of stream applications.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def state() -> None:
    """State of stream applications."""


@app.command(short_help="Rebuild a lost state from the log.")
def rebuild(
    application: Annotated[str, typer.Argument(help="The application: join.")],
    dry_run: DryRun = False,
    yes: CarryOut = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Write the state although it lacks halves of open tasks, which have left the log.",
        ),
    ] = False,
    marker_ttl: Annotated[float, variable_option(variables.MARKER_TTL, "--marker-ttl")] = variables.MARKER_TTL.default,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Folds the committed halves once more and writes the state to the join's changelog; outputs are discarded.

    The join must be stopped. Halves that have left the log are not in the state: open tasks with such halves are
    counted, and --yes ends with 7 without --accept-loss."""
    import asyncio  # here: it takes half as long as the rest of `--help`

    from schemas import topics
    from streams.apps.join.halves_before import tasks_lacking
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
            lacking = tasks_lacking(settings, codec, spans)
            if lacking and write and not accept_loss:
                raise CommandError(f"nothing was written. {_described(lacking)}. {WAYS_ON}", ExitCode.PERMANENT)
            if write:
                for each in lacking:
                    publisher.send(topics.AUDIT, each.audit())
                publisher.flush()
                work.begin(spans)
            for partition, span in spans.items():
                rebuilt = asyncio.run(work.partition(partition, span))
                rows.append(
                    {
                        "partition": partition,
                        "from": rebuilt.begin,
                        "to": rebuilt.end,
                        "entries": len(rebuilt.entries),
                        "lacking": sum(len(each.task_ids) for each in lacking if each.partition == partition),
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
    show(output, ("partition", "from", "to", "entries", "lacking", "sha256"), rows)
    if lacking:
        typer.echo(f"{'given up, as --accept-loss asks' if write else 'lost'}: {_described(lacking)}", err=True)
        if not write:
            typer.echo(f"nothing was written: --yes with --accept-loss writes this state. {WAYS_ON}", err=True)
            return
    typer.echo("written" if write else "nothing was written: --yes writes this state", err=True)


def _described(lacking: Sequence[TasksLacking]) -> str:
    return (
        f"{sum(len(each.task_ids) for each in lacking):,} open tasks have halves before the first that is still on the "
        f"log, which the rebuilt state lacks: {'; '.join(map(str, lacking))}"
    )
