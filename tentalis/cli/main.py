"""The `tentalis` command. Each group is a module of its own; what is heavy is imported inside the commands."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tentalis.cli import (
    archive,
    dlq,
    forget,
    keys,
    loop,
    policy,
    processes,
    records,
    rollouts,
    schemas,
    stack,
    system,
    topics,
    train,
)
from tentalis.cli.common import configure_logging, explain, warn_of_misspelt_variables
from tentalis.cli.system import print_version


class Commands(TyperGroup):
    """Turns an exception into one line on stderr and an exit code; TENTALIS_DEBUG=1 shows the traceback too."""

    def invoke(self, ctx: Any) -> Any:
        try:
            configure_logging()
            warn_of_misspelt_variables()
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get("TENTALIS_DEBUG") == "1":
                traceback.print_exc()
            message, code = explain(error)
            print(f"error: {message}", file=sys.stderr)
            raise typer.Exit(code) from error


app = typer.Typer(
    cls=Commands,
    name="tentalis",
    help="Agents that learn from being used, on Kafka, replayable to the byte.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 drift or incompatible, 4 unreachable, 5 needs a person, "
    "6 forbidden, 7 no restart helps. TENTALIS_DEBUG=1: tracebacks.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The options before the command."""


app.command(short_help="The whole loop, from nothing to a better policy.")(loop.demo)
app.command(short_help="Start the local stack and stay.")(stack.up)
app.command(short_help="Stop the local stack; its data stays.")(stack.down)
app.command(short_help="The processes of the local stack.")(stack.status)
app.command(short_help="Train a run again from its topics: equal or not.")(loop.replay)
app.command(short_help="A run as files, for another cluster or a shelf.", name="export")(archive.export)
app.command(short_help="Put an exported run onto this log.", name="import")(archive.import_)
app.command(short_help="Check a run: nothing lost, twice or mixed.")(loop.verify)
app.command(short_help="Let somebody leave: husks for rollouts, no live state.")(forget.forget)
app.add_typer(rollouts.app, name="rollouts", short_help="What was tried and how it went: list, show, query.")
app.add_typer(topics.app, name="topics", short_help="Topics on the broker, held against our table.")
app.add_typer(schemas.app, name="schemas", short_help="The Avro schemas: check, list, show, register, fingerprint.")
app.command(short_help="Show records of a topic.")(records.consume)
app.command(short_help="Write records to a topic from JSON.")(records.produce)
app.add_typer(dlq.app, name="dlq", short_help="Dead letters: look, replay, drop.")
app.add_typer(policy.app, name="policy", short_help="Versions of policies: look, promote, roll back, keep.")
app.add_typer(keys.app, name="keys", short_help="API keys of the gateway: create, list, revoke.")
app.add_typer(processes.app, name="serve", short_help="Run one process of the stack.")
app.command(short_help="Answer tasks with the newest policy.")(processes.worker)
app.command(short_help="Give tasks and the users' feedback.")(processes.manager)
app.command(short_help="Train on rollouts and publish adapters.")(train.train)
app.command(short_help="What is missing here, and what to do about it.")(system.doctor)
app.command(short_help="Versions of everything that counts.")(system.version)
