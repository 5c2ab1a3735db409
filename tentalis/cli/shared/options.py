"""Options of several commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.startup import HOLD
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.variable import Variable


def variable_option(
    variable: Variable[Any], flag: str, *, text: str = "", callback: Callable[..., Any] | None = None
) -> Any:
    """Returns an option that a variable also sets: bounds and meaning are the variable's; `text` replaces the meaning.

    Its parameter takes the variable's default.
    """
    meaning = text or variable.meaning
    if variable.default is None and variable.default_text and not text:
        meaning += f" Default: {variable.default_text.replace('`', '')}."
    return typer.Option(
        flag,
        envvar=variable.name,
        help=meaning,
        show_default=variable.default is not None,
        min=variable.kind.least,
        max=variable.kind.most,
        callback=callback,
    )


def _note_metrics_port(ctx: typer.Context, port: int | None) -> int | None:
    """Keeps what is needed to hold a process after its end (`hold_if_wanted`)."""
    ctx.meta[HOLD] = port, variables.HOLD.read() or ()
    return port


class ScenarioName(StrEnum):
    ASSISTANT = "assistant"
    ECHO = "echo"
    MATH = "math"


Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-server",
        help="Kafka brokers, host:port[,host:port]. Default: TENTALIS_BOOTSTRAP, else the running local stack.",
        show_default=False,
    ),
]
MetricsPort = Annotated[
    int | None,
    variable_option(
        variables.METRICS_PORT,
        "--metrics-port",
        text=f"{variables.METRICS_PORT.meaning} TENTALIS_METRICS_HOST sets the address, 127.0.0.1 by default.",
        callback=_note_metrics_port,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]
CarryOut = Annotated[bool, typer.Option("--yes", "-y", help="Carry out the plan; without it, the plan is only shown.")]
YesOnTerminal = Annotated[
    bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt. Without a terminal there is none.")
]


def ask(question: str) -> None:
    """Asks for a confirmation.

    Raises:
        typer.Abort: the answer is no.
        CommandError: there is no answer, because standard input has ended.
    """
    try:
        answer = typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo(err=True)  # the question's line is open
        raise CommandError("nobody answered: --yes goes on without the question", ExitCode.USAGE) from None
    if not answer:
        raise typer.Abort


def ask_on_terminal(question: str) -> None:
    """Asks for a confirmation if a person can answer: what can be undone may be in scripts. Raises typer.Abort."""
    if sys.stdin.isatty():
        ask(question)
