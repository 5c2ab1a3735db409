"""`tentalis rollouts`: the trajectory store, asked."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import USAGE, Bootstrap, CommandError, print_json, print_table, reached

if TYPE_CHECKING:
    from tentalis.config import Settings
    from tentalis.trajectories import Table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
LISTED = ("time", "rollout_id", "version", "environment", "session_id", "reward", "has_opd", "trained_tokens")


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


Format = Annotated[Output, typer.Option("--output", "-o", help="On stdout; logs go to stderr.")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Read the whole topic again instead of going on.")]


@app.command("list")
def list_(
    policy: Annotated[str | None, typer.Option("--policy", help="What this policy can be trained on.")] = None,
    version: Annotated[int | None, typer.Option("--version", min=0, help="What this version of it sampled.")] = None,
    environment: Annotated[str | None, typer.Option("--environment", help="chat, math, ...")] = None,
    session: Annotated[str | None, typer.Option("--session", help="Id of a conversation.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run that asked for the tasks.")] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="At least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="At most this reward.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="From 2026-01-31T12:00:00Z on, or 1h for an hour ago.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this time.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most rows.")] = 20,
    rebuild: Rebuild = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Rollouts, the newest first."""
    from tentalis.trajectories import Filters, listed, view_of

    filters = Filters(
        policy=policy,
        version=version,
        environment=environment,
        session=session,
        run=run,
        least=min_reward,
        most=max_reward,
        since=_moment("--since", since),
        until=_moment("--until", until),
    )
    with reached(bootstrap) as settings:
        _refreshed(settings, rebuild)
        found = listed(view_of(settings), filters, limit)
    _print(found, output, LISTED)


@app.command()
def show(
    rollout_id: Annotated[str, typer.Argument(help="Its id, or the id of a task for all its rollouts.")],
    bootstrap: Bootstrap = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="json: the records themselves, tokens and all.")
    ] = Output.TABLE,
) -> None:
    """One rollout with everything it has, or all of a task."""
    from tentalis.trajectories import query, record_at, view_of

    with reached(bootstrap) as settings:
        _refreshed(settings, False)
        name = rollout_id.replace("'", "''")
        which = f"rollout_id = '{name}' OR task_id = '{name}'"
        found = query(view_of(settings), f"SELECT * FROM rollouts WHERE {which} ORDER BY sample_index, rollout_id")
        if not found.rows:
            raise CommandError(f"no rollout and no task {rollout_id!r}: it never was, or it was forgotten")
        if output is Output.JSON:
            from tentalis.cli.values import to_plain

            rows = found.dicts()
            places = [(str(row["rollout_id"]), int(row["partition"]), int(row["offset"])) for row in rows]
            print_json([to_plain(record) for place in places if (record := record_at(settings, *place)) is not None])
            return
    if output is Output.CSV:
        _print(found, output, found.columns)
        return
    for number, row in enumerate(found.dicts()):
        if number:
            print()
        print_table(("field", "value"), [(name, value) for name, value in row.items() if value is not None])


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="One statement about the table `rollouts` (DESCRIBE rollouts).")],
    rebuild: Rebuild = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """SQL, as DuckDB has it: tentalis rollouts query "SELECT version, avg(reward) FROM rollouts GROUP BY 1"."""
    from tentalis.trajectories import BadQuery, view_of
    from tentalis.trajectories import query as ask

    with reached(bootstrap) as settings:
        _refreshed(settings, rebuild)
        try:
            found = ask(view_of(settings), sql)
        except BadQuery as error:
            raise CommandError(str(error), USAGE) from error
    _print(found, output, found.columns)


def _refreshed(settings: Settings, rebuild: bool) -> None:
    from tentalis.trajectories import refresh

    done = refresh(settings, rebuild=rebuild)
    if done.rebuilt:
        typer.echo(f"the view was built anew ({done.rebuilt}): {done.added} rollouts", err=True)
    for line in done.unreadable:
        typer.echo(f"passed over, no rollout: {line}", err=True)


def _moment(option: str, text: str | None) -> datetime | None:
    """As DuckDB has times: UTC, without saying so."""
    if text is None:
        return None
    from tentalis.kafka import now_ms
    from tentalis.moments import parse_moment

    try:
        return datetime.fromtimestamp(parse_moment(text, now_ms()) / 1000, UTC).replace(tzinfo=None)
    except ValueError as error:
        raise CommandError(f"{option}: {error}", USAGE) from error


def _print(table: Table, output: Output, shown: tuple[str, ...]) -> None:
    rows = table.dicts()
    if output is Output.JSON:
        print_json([{name: _plain(value) for name, value in row.items()} for row in rows])
    elif output is Output.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([[_plain(value) for value in row] for row in table.rows])
    else:
        print_table(shown, [[_cell(row[name]) for name in shown] for row in rows])


def _plain(value: Any) -> Any:
    return value.isoformat(timespec="milliseconds") + "Z" if isinstance(value, datetime) else value


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.isoformat(" ", "seconds") + "Z" if isinstance(value, datetime) else value
