"""`tentalis gateway`: shows the requests of a running gateway with what is learned from them."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text, readable
from tentalis.cli.shared.settings import reached
from tentalis.cli.shared.turn_text import hint_text, short
from tentalis.service.exit_codes import ExitCode
from tentalis.text.timestamps import written

app = typer.Typer(
    help="Requests of a running gateway, with what is learned from them.", no_args_is_help=True, rich_markup_mode=None
)
COLUMNS = ("TIME", "SESSION", "TURN", "EVENT", "WHAT")
WIDTHS = (20, 28, 4, 8)


@app.callback()
def group() -> None:
    """Requests of a running gateway, with what is learned from them."""


@app.command(short_help="Show requests live, with what was learned from each.")
def tail(
    user: Annotated[str | None, typer.Option("--user", help="Only requests of this user.", show_default=False)] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", help="Only this session, by its id on the log: USER/NAME.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Begin with what was written since then: RFC 3339, or 30m, 1h, 2d ago. Default: now.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", min=1, help="Stop after this many lines.", show_default=False)
    ] = None,
    leave: Annotated[bool, typer.Option("--exit", help="Stop at the end of the log; needs --since.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows requests as they are recorded, and what is learned from each: signals, feedback, hints with their source,
    scores, outcomes, and the step and version that trained on it. It reads the topics alone, so it works on every
    machine that reaches Kafka, whatever the number of gateways.

    A line about a turn from before the start has what its own record names. A step is shown for turns whose outcome
    came since the start. JSON output has one object per line.
    """
    from tentalis.ops.sessions.follow import follow_learning
    from tentalis.ops.sessions.learned import LearnedTail

    if leave and since is None:
        raise CommandError("--exit: give --since too, else there is nothing to show", ExitCode.USAGE)
    since_ms = None if since is None else moment_of("--since", since)
    lines, shown = LearnedTail(user, session), 0
    with reached(bootstrap) as settings, closing(follow_learning(settings, since_ms, stop_at_end=leave)) as entries:
        if output is OutputFormat.TABLE:
            print_text(_row(COLUMNS))
        for line in (line for entry in entries for line in lines.lines(entry)):
            if output is OutputFormat.TABLE:
                cells = (written(line["at"]), line["session"], line["turn"], line["event"], what(line))
                print_text(_row(["-" if cell is None else str(cell) for cell in cells]))
            else:
                print_data(output, line)
            shown += 1
            if shown == count:
                break
    if lines.unattributed:
        typer.echo(
            f"left out: {lines.unattributed} feedback records of turns from before the start; an earlier --since "
            "shows them",
            err=True,
        )


def _row(cells: tuple[str, ...] | list[str]) -> str:
    head = [cell.ljust(width) for cell, width in zip(cells[:-1], WIDTHS, strict=True)]
    flat = "  ".join([*head, cells[-1]])
    return "".join(char if char.isprintable() else " " for char in flat).rstrip()


def what(line: dict[str, Any]) -> str:
    """Returns what a line says about its turn, for a table."""
    match line["event"]:
        case "turn":
            failed = "" if line["status"] == "ok" else f" {line['status']}"
            no_task = f" (not learned from: {line['no_task']})" if line["no_task"] else ""
            return f"{line['kind']}{failed} {_quoted(line['asked'])} -> {_quoted(line['answered'])}{no_task}"
        case "signal":
            return f"{line['signal']}: {readable(line['verdict'])}"
        case "feedback":
            verdict = "" if line["verdict"] == "none" else f" {readable(line['verdict'])}"
            text = f" {_quoted(line['text'])}" if line["text"] else ""
            nothing = "" if verdict or text else " nothing followed"
            return f"{line['source']} {line['author']}".rstrip() + f":{verdict}{text}{nothing}"
        case "hint":
            return hint_text(line)
        case "score":
            return f"{_reward(line['reward'])} by {line['scorer']} from {line['source']}"
        case "outcome":
            explicit = " explicit" if line["explicit"] else ""
            reason = f" (not trained: {line['not_trainable']})" if line["not_trainable"] else ""
            return f"{line['kind']} reward {_reward(line['reward'])}{explicit}{reason}"
        case "trained":
            return f"{line['run']} step {line['step']} -> {line['version']}"
        case "end":
            return "the session ended"
    return json.dumps(line, ensure_ascii=False)


def _quoted(text: str) -> str:
    return f'"{short(text)}"'


def _reward(reward: float | None) -> str:
    return "unknown" if reward is None else str(readable(reward))
