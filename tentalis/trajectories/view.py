"""The files of the view, and what of the topic they hold.

`view.json` names the files that count and, per partition, the first offset that they do not hold. It is replaced as a
whole, after its files are on disk and before those it no longer names are removed: killed at any point, the view is the
one before or the one after, and what is left over is removed by the next refresh.
"""

import fcntl
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tentalis.trajectories.rows import COLUMNS, columns_of, selection

FORMAT = 1


class State(BaseModel):
    """view.json. `topic_id`: Kafka's id of the topic, another one after it was deleted and made again.
    `forgotten`: keys of husks and tombstones that were seen."""

    model_config = ConfigDict(frozen=True)

    format: int
    topic_id: str
    next: dict[int, int]
    files: tuple[str, ...]
    forgotten: tuple[str, ...]


class View:
    """The view in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "view.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One refresh at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def state(self) -> State | None:
        """What the view holds; None where there is none yet, or one of another version of this code."""
        try:
            state = State.model_validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        there = all((self.folder / name).is_file() for name in state.files)
        return state if state.format == FORMAT and there else None

    def paths(self) -> list[str]:
        """The Parquet files that count."""
        state = self.state()
        return [] if state is None else [str(self.folder / name) for name in state.files]

    def add(self, rows: Sequence[tuple[Any, ...]]) -> str:
        """Writes rows to a new file, which does not count yet, and returns its name."""
        import duckdb

        name = f"{uuid.uuid4().hex}.parquet"
        columns = columns_of(rows)
        with duckdb.connect() as connection:
            connection.register("columns", columns)
            order = 'ORDER BY "partition", "offset"'
            self._copy(connection, f"SELECT {selection()} FROM columns {order}", name)
        return name

    def without(self, name: str, keys: Collection[str]) -> str | None:
        """The file without the rows of some keys: its own name where it has none of them, None where nothing is left,
        else a new file, which does not count yet."""
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
        """The rows of several files in one new file, which does not count yet."""
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

    def replace(self, state: State) -> None:
        """From now on this counts; files that it does not name are removed."""
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(state.model_dump_json())
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(self._path)
        self.tidy()

    def tidy(self) -> None:
        """Removes the files that do not count: what a refresh that was killed has left."""
        state = self.state()
        for path in self.folder.glob("*.parquet"):
            if state is None or path.name not in state.files:
                path.unlink()


def empty_select() -> str:
    """The columns without a row."""
    return "SELECT " + ", ".join(f'CAST(NULL AS {c.type}) AS "{name}"' for name, c in COLUMNS.items()) + " LIMIT 0"
