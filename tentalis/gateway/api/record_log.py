"""The interface between the bridge and the log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from schemas.records import Record
from tentalis.gateway.api.offset_index import IndexedRecord
from tentalis.gateway.api.training import GroupAnswer

R = TypeVar("R", bound=Record)


@dataclass(slots=True)
class LogBatch:
    """The result of one read of the log: offset references with their keys, and the decoded records."""

    refs: list[tuple[IndexedRecord, bytes]] = field(default_factory=list)
    records: list[tuple[IndexedRecord, Record]] = field(default_factory=list)


class RecordLog(Protocol):
    """The log operations that the bridge needs."""

    @property
    def stale_reason(self) -> str | None:
        """The reason why the index may be stale, None if it is current."""
        ...

    def start(self, on_batch: Callable[[LogBatch], None], decode_all: Callable[[], bool]) -> None:
        """Starts calling `on_batch` on the running event loop with each read. `decode_all`: True if all records must be
        decoded."""
        ...

    async def append(self, topic: str, record: Record) -> IndexedRecord:
        """Appends a record and returns its place once the broker has acknowledged it. Raises APIError."""
        ...

    async def records(self, refs: Sequence[IndexedRecord], record_type: type[R]) -> list[tuple[IndexedRecord, R]]:
        """Returns the records of that kind at these places, in log order. Raises APIError (503)."""
        ...

    async def consumer_groups(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
        """Returns the consumer groups and the age of that information (s); None while unknown. May take seconds."""
        ...

    def close(self) -> None:
        """Stops; blocks until appended records are acknowledged or given up."""
        ...
