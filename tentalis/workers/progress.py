"""How far each partition is done, when several of its records are under way at once and end in any order. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tentalis.kafka import Stored

Partition = tuple[str, int]


@dataclass(slots=True)
class _Entry:
    stored: Stored
    done: bool = False


class Progress:
    """The records of a consumer group member that are queued, under way or done but not committed."""

    def __init__(self) -> None:
        self._entries: dict[Partition, dict[int, _Entry]] = {}
        self._owned: set[Partition] = set()

    def assign(self, partitions: Iterable[Partition]) -> None:
        """These partitions are ours from now on."""
        self._owned.update(partitions)

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """These partitions are somebody else's. What is under way goes on (its results are harmless), uncommitted."""
        self._owned.difference_update(partitions)

    def owns(self, stored: Stored) -> bool:
        """Whether the record's partition is ours."""
        return (stored.topic, stored.partition) in self._owned

    def begin(self, stored: Stored) -> bool:
        """Takes a record on. False if it is on its way already: a rebalance hands out again what is not committed."""
        entries = self._entries.setdefault((stored.topic, stored.partition), {})
        if stored.offset in entries:
            return False
        entries[stored.offset] = _Entry(stored)
        return True

    def forget(self, stored: Stored) -> None:
        """Gives a record back undone: it was queued, and its partition went to somebody else."""
        self._entries[stored.topic, stored.partition].pop(stored.offset, None)

    def finish(self, stored: Stored) -> None:
        """The record's results are on the log."""
        self._entries[stored.topic, stored.partition][stored.offset].done = True

    def committable(self) -> list[Stored]:
        """Per owned partition the last record before which all are done, if there is a new one; each only once."""
        last = []
        for partition, entries in self._entries.items():
            if partition not in self._owned:
                for offset in [offset for offset, entry in entries.items() if entry.done]:
                    del entries[offset]
                continue
            newest = None
            for offset in sorted(entries):
                if not entries[offset].done:
                    break
                newest = entries.pop(offset).stored
            if newest is not None:
                last.append(newest)
        return last
