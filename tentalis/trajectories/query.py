"""Questions to the view."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tentalis.trajectories.view import View, empty_select


class BadQuery(ValueError):
    """SQL that DuckDB refuses; the message is DuckDB's."""


@dataclass(frozen=True, slots=True)
class Table:
    """An answer: names of columns, and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        """The rows by name of column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Filters:
    """What rollouts are asked for; None: any. Times are UTC, the reward's bounds inclusive."""

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


def listed(view: View, filters: Filters, limit: int | None = None) -> Table:
    """The rollouts that a filter lets through, the newest first."""
    wanted = {name: value for name in CONDITIONS if (value := getattr(filters, name)) is not None}
    where = " AND ".join(CONDITIONS[name] for name in wanted) or "true"
    sql = f'SELECT * FROM rollouts WHERE {where} ORDER BY time DESC, "partition", "offset" DESC'
    return _answer(view, sql + (f" LIMIT {limit:d}" if limit is not None else ""), list(wanted.values()))


def query(view: View, sql: str) -> Table:
    """The answer to one SQL statement about the table `rollouts`. Raises BadQuery."""
    return _answer(view, sql, [])


@contextmanager
def _connected(view: View) -> Iterator[Any]:
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        paths = ", ".join("'" + path.replace("'", "''") + "'" for path in view.paths())
        # Compaction may not have run yet: a key counts once, where it was written first.
        once = 'QUALIFY row_number() OVER (PARTITION BY rollout_id ORDER BY "partition", "offset") = 1'
        source = f"SELECT * FROM read_parquet([{paths}]) {once}" if paths else empty_select()
        connection.execute(f"CREATE VIEW rollouts AS {source}")
        yield connection


def _answer(view: View, sql: str, values: Sequence[Any]) -> Table:
    import duckdb

    with _connected(view) as connection:
        try:
            result = connection.execute(sql, values)
            columns = tuple(str(each[0]) for each in result.description or ())
            return Table(columns, result.fetchall())
        except duckdb.Error as error:
            raise BadQuery(str(error)) from error
