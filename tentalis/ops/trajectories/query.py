"""Queries to the view, by filters or in SQL."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tentalis.ops.trajectories.view import TrajectoryView, empty_select


class BadQuery(ValueError):
    """SQL that DuckDB rejects; the message is DuckDB's, in one line."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The answer to a query: names of columns, and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as dictionaries by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on rollouts; None: any. Times are UTC. The reward's bounds are inclusive."""

    policy: str | None = None
    version: int | None = None
    environment: str | None = None
    session: str | None = None
    run: str | None = None
    least: float | None = None
    most: float | None = None
    since: datetime | None = None
    until: datetime | None = None
    rollout_id: str | None = None


CONDITIONS = {
    "policy": "policy = ?",
    "version": "version = ?",
    "environment": "environment = ?",
    "session": "session_id = ?",
    "run": "run_id = ?",
    "least": "reward >= ?",
    "most": "reward <= ?",
    "since": "time >= ?",
    "until": "time < ?",
    "rollout_id": "rollout_id = ?",
}


def listed(view: TrajectoryView, filters: Filters, limit: int | None = None) -> QueryResult:
    """Returns the rollouts that match the filters, newest first."""
    wanted = {name: value for name in CONDITIONS if (value := getattr(filters, name)) is not None}
    where = " AND ".join(CONDITIONS[name] for name in wanted) or "true"
    sql = f'SELECT * FROM rollouts WHERE {where} ORDER BY time DESC, "partition", "offset" DESC'
    return _answer(view, sql + (f" LIMIT {limit:d}" if limit is not None else ""), list(wanted.values()))


def query(view: TrajectoryView, sql: str) -> QueryResult:
    """Returns the answer to one SQL statement on the table `rollouts`. Raises BadQuery."""
    return _answer(view, sql, [])


@contextmanager
def _connected(view: TrajectoryView) -> Iterator[Any]:
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        paths = ", ".join("'" + path.replace("'", "''") + "'" for path in view.paths())
        # The topic may not be compacted yet: of several records of a key, the first counts.
        once = 'QUALIFY row_number() OVER (PARTITION BY rollout_id ORDER BY "partition", "offset") = 1'
        source = f"SELECT * FROM read_parquet([{paths}]) {once}" if paths else empty_select()
        connection.execute(f"CREATE VIEW rollouts AS {source}")
        yield connection


def _answer(view: TrajectoryView, sql: str, values: Sequence[Any]) -> QueryResult:
    import duckdb

    with _connected(view) as connection:
        try:
            result = connection.execute(sql, values)
            columns = tuple(str(each[0]) for each in result.description or ())
            return QueryResult(columns, result.fetchall())
        except duckdb.Error as error:
            raise BadQuery(_one_line(str(error))) from error


def _one_line(said: str) -> str:
    """Returns a message of DuckDB without the picture of the place at its end."""
    reason = " ".join(said.partition("\n\nLINE ")[0].split())
    return f"{reason}; `DESCRIBE rollouts` lists the columns"
