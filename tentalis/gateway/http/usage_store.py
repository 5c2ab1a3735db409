"""The usage of API keys per UTC day, in an SQLite file of one gateway.

The gateway saves changed counts once a second and at its end. A kill forgets at most the counts of the last second, and
those of calls that were under way.
"""

import logging
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

FILE_NAME = ".usage.sqlite"
KEPT_DAYS = 31
_DAMAGED_SUFFIX = ".damaged"
_TABLE = """CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key_id TEXT NOT NULL, requests INTEGER NOT NULL, tokens INTEGER NOT NULL,
    refused INTEGER NOT NULL, PRIMARY KEY (day, key_id)) WITHOUT ROWID"""
_SAVE = "INSERT OR REPLACE INTO usage (day, key_id, requests, tokens, refused) VALUES (?, ?, ?, ?, ?)"
_READ = "SELECT day, key_id, requests, tokens, refused FROM usage WHERE day >= ? ORDER BY day, key_id"


@dataclass(slots=True)
class DayUse:
    """The usage of one key on one UTC day (YYYY-MM-DD). `requests`: those that were admitted; `tokens`: of prompts and
    answers; `refused`: requests over a limit."""

    day: str
    key_id: str
    requests: int = 0
    tokens: int = 0
    refused: int = 0


class UsageStore:
    """The file of one gateway; no other process writes it. Every method may be called on any thread. A damaged file is
    set aside as `*.damaged` at the start, and the counts begin again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._days("")
        except sqlite3.OperationalError:
            return  # the folder or the disk: the next save tells
        except sqlite3.DatabaseError as error:
            aside = path.with_name(path.name + _DAMAGED_SUFFIX)
            log.error("%s is set aside as %s: %s. The budgets of today begin again", path, aside.name, error)
            path.rename(aside)

    def save(self, days: Iterable[DayUse]) -> None:
        """Writes counts in place of earlier ones of the same day and key. Raises OSError."""
        try:
            with closing(self._open()) as database, database:
                database.executemany(_SAVE, map(astuple, days))
        except sqlite3.Error as error:
            raise OSError(f"the usage of API keys cannot be saved to {self._path}: {error}") from error

    def days(self, first: str) -> list[DayUse]:
        """Returns the counts from a day on (YYYY-MM-DD), by day and key. Raises OSError."""
        try:
            return self._days(first)
        except sqlite3.Error as error:
            raise OSError(f"the usage of API keys cannot be read from {self._path}: {error}") from error

    def drop_before(self, day: str) -> None:
        """Deletes the counts of days before this one (YYYY-MM-DD). Raises OSError."""
        try:
            with closing(self._open()) as database, database:
                database.execute("DELETE FROM usage WHERE day < ?", (day,))
        except sqlite3.Error as error:
            raise OSError(f"old usage of API keys cannot be deleted from {self._path}: {error}") from error

    def _days(self, first: str) -> list[DayUse]:
        with closing(self._open()) as database:
            return [DayUse(*row) for row in database.execute(_READ, (first,))]

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=5.0)
        try:
            database.execute(_TABLE)
        except BaseException:
            database.close()
            raise
        return database
