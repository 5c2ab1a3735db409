"""Puts entries of several topics in the order in which their records were appended. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tentalis.ops.sessions.learned import LearnedEntry


class AppendOrder:
    """Holds entries back, so that those of another topic that were appended earlier, and arrive a little later, come
    first. Entries of one append time come by the rank of their topic, those of one rank as they arrived.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, LearnedEntry]] = []

    def add(self, entries: Iterable[tuple[int, LearnedEntry]], arrived: float) -> None:
        """Adds entries, each with its rank, that arrived at this moment."""
        self._waiting += ((arrived, rank, entry) for rank, entry in entries)

    def take(self, until: float) -> list[LearnedEntry]:
        """Removes and returns the entries that arrived up to this moment, in order."""
        ready = [each for each in self._waiting if each[0] <= until]
        self._waiting = [each for each in self._waiting if each[0] > until]
        return [entry for _, _, entry in sorted(ready, key=lambda each: (each[2].at, each[1]))]
