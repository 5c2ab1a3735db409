"""`tentalis rollouts`: queries of the trajectory store."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode
from tentalis.service.stdout import data

if TYPE_CHECKING:
    from tentalis.ops.trajectories import QueryResult
    from tentalis.service.settings import Settings

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
LISTED = ("time", "rollout_id", "version", "environment", "session_id", "reward", "has_opd", "trained_tokens")


class RolloutFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


DATA_FORMATS = {RolloutFormat.JSON: OutputFormat.JSON, RolloutFormat.YAML: OutputFormat.YAML}

Format = Annotated[RolloutFormat, typer.Option("--output", "-o", help="Output format, on stdout; logs go to stderr.")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Read the whole topic again, not only what is new.")]


@app.command("list")
def list_(
    policy: Annotated[str | None, typer.Option("--policy", help="Only rollouts to train this policy on.")] = None,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Only samples of this version.")] = None,
    environment: Annotated[str | None, typer.Option("--environment", help="chat, math, ...")] = None,
    session: Annotated[str | None, typer.Option("--session", help="Id of a session.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run that the tasks belong to.")] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Lowest reward.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Highest reward.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="From 2026-01-31T12:00:00Z on, or 1h for an hour ago.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this time.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of rows.")] = 20,
    rebuild: Rebuild = False,
    bootstrap: Bootstrap = None,
    output: Format = RolloutFormat.TABLE,
) -> None:
    """Lists rollouts, newest first."""
    from tentalis.ops.trajectories import Filters, listed, view_of

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
    rollout_id: Annotated[str, typer.Argument(help="Id of a rollout, or of a task for all its rollouts.")],
    bootstrap: Bootstrap = None,
    output: Annotated[
        RolloutFormat, typer.Option("--output", "-o", help="json: the full records, tokens included.")
    ] = RolloutFormat.TABLE,
) -> None:
    """Shows all fields of a rollout, or of all rollouts of a task."""
    from tentalis.ops.trajectories import query, record_at, view_of

    with reached(bootstrap) as settings:
        _refreshed(settings, False)
        name = rollout_id.replace("'", "''")
        which = f"rollout_id = '{name}' OR task_id = '{name}'"
        found = query(view_of(settings), f"SELECT * FROM rollouts WHERE {which} ORDER BY sample_index, rollout_id")
        if not found.rows:
            raise CommandError(f"no rollout or task {rollout_id!r}: the id is wrong, or it was forgotten")
        if output in DATA_FORMATS:
            from tentalis.cli.shared.record_json import to_plain

            rows = found.dicts()
            places = [(str(row["rollout_id"]), int(row["partition"]), int(row["offset"])) for row in rows]
            records = (record_at(settings, *place) for place in places)
            print_data(DATA_FORMATS[output], [to_plain(record) for record in records if record is not None])
            return
    if output is RolloutFormat.CSV:
        _print(found, output, found.columns)
        return
    for number, row in enumerate(found.dicts()):
        if number:
            print_text()
        print_table(("field", "value"), [(name, value) for name, value in row.items() if value is not None])


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="One statement on the table `rollouts` (try DESCRIBE rollouts).")],
    rebuild: Rebuild = False,
    bootstrap: Bootstrap = None,
    output: Format = RolloutFormat.TABLE,
) -> None:
    """Runs SQL of DuckDB. Example: tentalis rollouts query "SELECT version, avg(reward) FROM rollouts GROUP BY 1"."""
    from tentalis.ops.trajectories import BadQuery, view_of
    from tentalis.ops.trajectories import query as ask

    with reached(bootstrap) as settings:
        _refreshed(settings, rebuild)
        try:
            found = ask(view_of(settings), sql)
        except BadQuery as error:
            raise CommandError(str(error), ExitCode.USAGE) from error
    _print(found, output, found.columns)


def _refreshed(settings: Settings, rebuild: bool) -> None:
    from tentalis.ops.trajectories import refresh

    done = refresh(settings, rebuild=rebuild)
    if done.rebuilt:
        typer.echo(f"the view was rebuilt ({done.rebuilt}): {done.added} rollouts", err=True)
    for line in done.unreadable:
        typer.echo(f"skipped, not a rollout: {line}", err=True)


def _moment(option: str, text: str | None) -> datetime | None:
    """Parses a time into UTC without a time zone, as DuckDB stores times. Raises CommandError."""
    if text is None:
        return None
    from tentalis.text.timestamps import now_ms, parse_moment

    try:
        return datetime.fromtimestamp(parse_moment(text, now_ms()) / 1000, UTC).replace(tzinfo=None)
    except ValueError as error:
        raise CommandError(f"{option}: {error}", ExitCode.USAGE) from error


def _print(table: QueryResult, output: RolloutFormat, shown: tuple[str, ...]) -> None:
    rows = table.dicts()
    if output in DATA_FORMATS:
        print_data(DATA_FORMATS[output], [{name: _plain(value) for name, value in row.items()} for row in rows])
    elif output is RolloutFormat.CSV:
        writer = csv.writer(data(), lineterminator="\n")
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
