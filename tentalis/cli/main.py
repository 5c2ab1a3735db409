"""The `tentalis` command. Each group is a module of its own; what is heavy is imported inside the commands."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tentalis.cli import loop, processes, records, stack, system, topics
from tentalis.cli.common import configure_logging, explain
from tentalis.cli.system import print_version


class Commands(TyperGroup):
    """Turns an exception into one line on stderr and an exit code; TENTALIS_DEBUG=1 shows the traceback too."""

    def invoke(self, ctx: Any) -> Any:
        try:
            configure_logging()
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
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 drift or incompatible, 4 unreachable. TENTALIS_DEBUG=1: tracebacks.",
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


app.command()(loop.demo)
app.command()(stack.up)
app.command()(stack.down)
app.command()(stack.status)
app.command()(loop.replay)
app.command()(loop.verify)
app.add_typer(topics.app, name="topics")
app.command()(records.consume)
app.command()(records.produce)
app.add_typer(processes.app, name="serve")
app.command()(processes.worker)
app.command()(processes.manager)
app.command()(processes.trainer)
app.command()(system.doctor)
app.command()(system.version)
