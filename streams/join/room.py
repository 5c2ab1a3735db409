"""How much may be open in one process, and which partitions are read on when it is nearly that much.

Nothing is evicted for want of room: what a task becomes must depend on the log alone. So the input waits. What is open
in a partition can only be closed by what lies further on in the same partition (halves, and the time that deadlines are
measured by), so a partition that waits never gets smaller by waiting. What can make room is the other partitions.
Above the low-water mark they are therefore read one at a time, always the one whose clock is furthest behind; at the
bound itself nothing is read any more, until partitions move to another worker or the bound is raised.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

log = logging.getLogger(__name__)

LOW_WATER = 0.8
SAY_EVERY_S = 60.0


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


class Room:
    """What a process with a bound says of it: to its input, to its operators.

    Args:
        loads: what is open now, by partition.
        what: what is open, as its metric and option name it: tasks.
    """

    def __init__(self, bound: Bound, loads: Callable[[], Mapping[int, Load]], what: str) -> None:
        self._bound, self._loads, self._what = bound, loads, what
        self._bounded = bound.tasks is not None or bound.bytes is not None
        self._stage, self._said_at = Stage.FREE, 0.0

    def waits(self, partition: int) -> bool:
        """Whether a partition is not read on."""
        if not self._bounded:
            return False
        loads = self._loads()
        self._say(self._bound.stage(loads))
        return self._bound.waits(loads, partition)

    def full(self) -> str | None:
        """Why nothing is read on; None if something is."""
        if not self._bounded or self._bound.stage(self._loads()) is not Stage.FULL:
            return None
        return f"its input waits: {self._open_now()}. Raise the bound, or start another worker"

    def paused(self) -> int:
        """How many partitions are not read on."""
        loads = self._loads()
        return sum(self._bound.waits(loads, partition) for partition in loads) if self._bounded else 0

    def _open_now(self) -> str:
        loads, bound = self._loads().values(), self._bound
        count, size = sum(load.tasks for load in loads), sum(load.bytes for load in loads)
        most = [
            f"{most:,} {unit}" for most, unit in ((bound.tasks, self._what), (bound.bytes, "bytes")) if most is not None
        ]
        return f"{count:,} {self._what} with {size:,} bytes are open, the bound is {' and '.join(most)}"

    def _say(self, stage: Stage) -> None:
        now = time.monotonic()
        # Between FREE and TURNS it may go back and forth with every batch.
        if stage is Stage.FREE or (stage is self._stage and now - self._said_at < SAY_EVERY_S):
            return
        self._stage, self._said_at = stage, now
        if stage is Stage.TURNS:
            log.warning("%s: partitions are read one at a time, the oldest clock first", self._open_now())
        else:
            log.error(
                "%s: no partition is read on. Nothing is lost, and nothing is evicted: raise --max-open-%s or "
                "--max-open-bytes, let state lie on disk, or start another worker, which takes partitions over",
                self._open_now(),
                self._what,
            )
