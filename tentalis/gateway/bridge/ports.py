"""What the bridge needs of the log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from schemas.records import Record
from tentalis.gateway.bridge.facts import Fact
from tentalis.gateway.bridge.training import GroupAnswer

R = TypeVar("R", bound=Record)


@dataclass(slots=True)
class Found:
    """What one look at the log brought: facts with their keys, and the records that were decoded."""

    facts: list[tuple[Fact, bytes]] = field(default_factory=list)
    records: list[tuple[Fact, Record]] = field(default_factory=list)


class TheLog(Protocol):
    """What the bridge needs of the log."""

    @property
    def trouble(self) -> str | None:
        """Why what was found of it may be old, None if it is not."""
        ...

    def start(self, take: Callable[[Found], None], wanted: Callable[[], bool]) -> None:
        """Begins to call `take` on the running event loop with what is found. `wanted`: whether all must be decoded."""
        ...

    async def append(self, topic: str, record: Record) -> Fact:
        """Where a record lies, once the broker has acknowledged it. Raises Refused."""
        ...

    async def records(self, facts: Sequence[Fact], kind: type[R]) -> list[tuple[Fact, R]]:
        """The records of that kind that lie there, in the order of the log. Raises Refused (503)."""
        ...

    async def groups(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
        """The consumer groups and how long ago they were looked at (s); None if nobody told yet. May take seconds."""
        ...

    def close(self) -> None:
        """Ends; blocks until what was appended is acknowledged, or given up."""
        ...
