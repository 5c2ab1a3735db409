"""How much may be open in one process, and which partitions are read on when it is nearly that much. Pure.

Nothing is evicted for want of room: what a task becomes must depend on the log alone. So the input waits. What is open
in a partition can only be closed by what lies further on in the same partition (halves, and the time that deadlines are
measured by), so a partition that waits never gets smaller by waiting. What can make room is the other partitions.
Above the low-water mark they are therefore read one at a time, always the one whose clock is furthest behind; at the
bound itself nothing is read any more, until partitions move to another worker or the bound is raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

LOW_WATER = 0.8


class Load(NamedTuple):
    """What is open in one partition: tasks, bytes of the halves that they wait with, and its stream time (ms)."""

    tasks: int
    bytes: int
    time: int


class Stage(Enum):
    """FREE: all partitions are read. TURNS: one at a time. FULL: none."""

    FREE = "free"
    TURNS = "turns"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Bound:
    """The most tasks, and the most bytes of waiting halves, that may be open in one process; None: no bound. Looked at
    between batches, so each partition may go over it by what one batch opens."""

    tasks: int | None = None
    bytes: int | None = None

    def stage(self, loads: Mapping[int, Load]) -> Stage:
        """What the process may do with so much open.

        >>> Bound(tasks=10).stage({0: Load(7, 0, 0), 1: Load(1, 0, 0)})
        <Stage.TURNS: 'turns'>
        """
        share = 0.0
        if self.tasks is not None:
            share = sum(load.tasks for load in loads.values()) / self.tasks
        if self.bytes is not None:
            share = max(share, sum(load.bytes for load in loads.values()) / self.bytes)
        return Stage.FREE if share < LOW_WATER else Stage.TURNS if share < 1 else Stage.FULL

    def waits(self, loads: Mapping[int, Load], partition: int) -> bool:
        """Whether a partition is not to be read on now."""
        stage = self.stage(loads)
        if stage is Stage.TURNS:
            return partition != min(loads, key=lambda number: (loads[number].time, number))
        return stage is Stage.FULL
