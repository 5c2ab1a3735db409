"""The files of the trajectory view (a local copy of the rollouts topic for SQL queries), and the offsets that they
cover.

`view.json` names the current files and, per partition, the first offset that they do not cover. It is replaced
atomically, after the new files are on disk and before the old ones are removed. So a process killed at any point leaves
the old view or the new one, and the next refresh removes the leftover files.
"""

import fcntl
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tentalis.ops.trajectories.rows import COLUMNS, columns_of, selection

FORMAT = 1


class ViewState(BaseModel):
    """The content of view.json. `topic_id`: Kafka's id of the topic, which changes when the topic is recreated.
    `forgotten`: keys of the redacted rollouts and tombstones that were read."""

    model_config = ConfigDict(frozen=True)

    format: int
    topic_id: str
    next: dict[int, int]
    files: tuple[str, ...]
    forgotten: tuple[str, ...]


class TrajectoryView:
    """The view in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "view.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock that allows one refresh at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def state(self) -> ViewState | None:
        """Returns the view's state; None if there is no view yet, or if it has another FORMAT or lacks files."""
        try:
            state = ViewState.model_validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        there = all((self.folder / name).is_file() for name in state.files)
        return state if state.format == FORMAT and there else None

    def paths(self) -> list[str]:
        """Returns the paths of the current Parquet files."""
        state = self.state()
        return [] if state is None else [str(self.folder / name) for name in state.files]

    def add(self, rows: Sequence[tuple[Any, ...]]) -> str:
        """Writes rows to a new file, which is not part of the view yet, and returns its name."""
        import duckdb

        name = f"{uuid.uuid4().hex}.parquet"
        columns = columns_of(rows)
        with duckdb.connect() as connection:
            connection.register("columns", columns)
            order = 'ORDER BY "partition", "offset"'
            self._copy(connection, f"SELECT {selection()} FROM columns {order}", name)
        return name

    def without(self, name: str, keys: Collection[str]) -> str | None:
        """Removes the rows of some keys from a file and returns the name of the file to use instead.

        That is the same name if the file has none of the keys, None if no row is left, else the name of a new file,
        which is not part of the view yet.
        """
        if not keys:
            return name
        import duckdb

        with duckdb.connect() as connection:
            path = str(self.folder / name)
            gone = "list_contains(?, rollout_id)"
            count = f"SELECT count(*), count(*) FILTER ({gone}) FROM read_parquet(?)"
            found = connection.execute(count, [list(keys), path]).fetchone()
            assert found is not None
            total, concerned = found
            if not concerned or total == concerned:
                return None if total == concerned else name
            kept = f"{uuid.uuid4().hex}.parquet"
            connection.execute(
                f"CREATE TEMP TABLE kept AS SELECT * FROM read_parquet(?) WHERE NOT {gone}", [path, list(keys)]
            )
            self._copy(connection, "SELECT * FROM kept", kept)
        return kept

    def merged(self, names: Sequence[str]) -> str:
        """Merges several files into a new one, which is not part of the view yet, and returns its name."""
        import duckdb

        name = f"{uuid.uuid4().hex}.parquet"
        with duckdb.connect() as connection:
            paths = [str(self.folder / each) for each in names]
            connection.execute("CREATE TEMP TABLE merged AS SELECT * FROM read_parquet(?)", [paths])
            self._copy(connection, 'SELECT * FROM merged ORDER BY "partition", "offset"', name)
        return name

    def _copy(self, connection: Any, select: str, name: str) -> None:
        quoted = str(self.folder / name).replace("'", "''")
        connection.execute(f"COPY ({select}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)")
        with (self.folder / name).open("rb") as handle:
            os.fsync(handle.fileno())

    def replace(self, state: ViewState) -> None:
        """Makes `state` the current view and removes the files that it does not name."""
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(state.model_dump_json())
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(self._path)
        self.tidy()

    def tidy(self) -> None:
        """Removes the files that are not part of the view, such as those of a refresh that was killed."""
        state = self.state()
        for path in self.folder.glob("*.parquet"):
            if state is None or path.name not in state.files:
                path.unlink()


def empty_select() -> str:
    """Returns the SQL that selects the columns without a row."""
    return "SELECT " + ", ".join(f'CAST(NULL AS {c.type}) AS "{name}"' for name, c in COLUMNS.items()) + " LIMIT 0"
