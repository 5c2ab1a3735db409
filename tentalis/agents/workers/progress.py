"""The committable offset of each partition, when its records are processed concurrently and end in any order. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tentalis.kafka.consumer import Stored

Partition = tuple[str, int]


@dataclass(slots=True)
class _Entry:
    stored: Stored
    done: bool = False


class OffsetProgress:
    """The records of a consumer group member that are queued, under way or done but not committed."""

    def __init__(self) -> None:
        self._entries: dict[Partition, dict[int, _Entry]] = {}
        self._owned: set[Partition] = set()

    def assign(self, partitions: Iterable[Partition]) -> None:
        """Adds partitions to the owned ones."""
        self._owned.update(partitions)

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Removes partitions from the owned ones. Their records under way finish, which is harmless, uncommitted."""
        self._owned.difference_update(partitions)

    def owns(self, stored: Stored) -> bool:
        """Returns True if this member owns the record's partition."""
        return (stored.topic, stored.partition) in self._owned

    def begin(self, stored: Stored) -> bool:
        """Adds a record. Returns False if it is under way: a rebalance delivers uncommitted records again."""
        entries = self._entries.setdefault((stored.topic, stored.partition), {})
        if stored.offset in entries:
            return False
        entries[stored.offset] = _Entry(stored)
        return True

    def forget(self, stored: Stored) -> None:
        """Removes a queued record whose partition was revoked."""
        self._entries[stored.topic, stored.partition].pop(stored.offset, None)

    def finish(self, stored: Stored) -> None:
        """Marks a record as done: its results are on the log."""
        self._entries[stored.topic, stored.partition][stored.offset].done = True

    def committable(self) -> list[Stored]:
        """Returns, per owned partition, the last record up to which all are done, if it is new; each only once."""
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
