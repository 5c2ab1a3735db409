"""Admission control: how much may be open in one process, and which partitions are read when it is nearly full.

Nothing is evicted to make room: the outcome of a task must depend on the log alone. So the input is paused. The open
tasks of a partition are closed only by later records of the same partition (halves, and the time that deadlines are
measured by), so pausing a partition frees nothing in it. Only the other partitions can make room. Above the low-water
mark, partitions are therefore read one at a time, always the one whose clock is furthest behind. At the bound nothing
is read until partitions move to another worker or the bound is raised.
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


class PartitionLoad(NamedTuple):
    """Open state of one partition: number of tasks, bytes of the halves that they hold, and stream time (ms)."""

    tasks: int
    bytes: int
    time: int


class AdmissionStage(Enum):
    """Reading mode. FREE: all partitions are read. TURNS: one at a time. FULL: none."""

    FREE = "free"
    TURNS = "turns"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class OpenBound:
    """The most tasks, and the most bytes of waiting halves, that may be open in one process; None: no bound. It is
    checked between batches, so each partition may exceed it by what one batch opens."""

    tasks: int | None = None
    bytes: int | None = None

    def stage(self, loads: Mapping[int, PartitionLoad]) -> AdmissionStage:
        """Returns the reading mode for these loads.

        >>> OpenBound(tasks=10).stage({0: PartitionLoad(7, 0, 0), 1: PartitionLoad(1, 0, 0)})
        <AdmissionStage.TURNS: 'turns'>
        """
        share = 0.0
        if self.tasks is not None:
            share = sum(load.tasks for load in loads.values()) / self.tasks
        if self.bytes is not None:
            share = max(share, sum(load.bytes for load in loads.values()) / self.bytes)
        return AdmissionStage.FREE if share < LOW_WATER else AdmissionStage.TURNS if share < 1 else AdmissionStage.FULL

    def waits(self, loads: Mapping[int, PartitionLoad], partition: int) -> bool:
        """Returns true if a partition must not be read now."""
        stage = self.stage(loads)
        if stage is AdmissionStage.TURNS:
            return partition != min(loads, key=lambda number: (loads[number].time, number))
        return stage is AdmissionStage.FULL


class AdmissionControl:
    """Admission control of a process: pauses partitions, and tells operators why.

    Args:
        loads: returns the open state by partition.
        what: the unit of open state, as in its metric and option names: tasks or sessions.
    """

    def __init__(self, bound: OpenBound, loads: Callable[[], Mapping[int, PartitionLoad]], what: str) -> None:
        self._bound, self._loads, self._what = bound, loads, what
        self._bounded = bound.tasks is not None or bound.bytes is not None
        self._stage, self._said_at = AdmissionStage.FREE, 0.0

    def waits(self, partition: int) -> bool:
        """Returns true if a partition is paused. Logs if the process is at the bound or close to it."""
        if not self._bounded:
            return False
        loads = self._loads()
        self._say(self._bound.stage(loads))
        return self._bound.waits(loads, partition)

    def full(self) -> str | None:
        """Returns the reason why all partitions are paused; None if any is read."""
        if not self._bounded or self._bound.stage(self._loads()) is not AdmissionStage.FULL:
            return None
        return f"all input is paused: {self._open_now()}. Raise the bound, or start another worker"

    def paused(self) -> int:
        """Returns the number of paused partitions."""
        loads = self._loads()
        return sum(self._bound.waits(loads, partition) for partition in loads) if self._bounded else 0

    def _open_now(self) -> str:
        loads, bound = self._loads().values(), self._bound
        count, size = sum(load.tasks for load in loads), sum(load.bytes for load in loads)
        most = [
            f"{most:,} {unit}" for most, unit in ((bound.tasks, self._what), (bound.bytes, "bytes")) if most is not None
        ]
        return f"{count:,} {self._what} with {size:,} bytes are open, the bound is {' and '.join(most)}"

    def _say(self, stage: AdmissionStage) -> None:
        now = time.monotonic()
        # The stage may alternate between FREE and TURNS with every batch.
        if stage is AdmissionStage.FREE or (stage is self._stage and now - self._said_at < SAY_EVERY_S):
            return
        self._stage, self._said_at = stage, now
        if stage is AdmissionStage.TURNS:
            log.warning("%s: partitions are read one at a time, the oldest clock first", self._open_now())
        else:
            log.error(
                "%s: all partitions are paused. Nothing is lost or evicted: raise --max-open-%s or --max-open-bytes, "
                "keep the state on disk, or start another worker, which takes over partitions",
                self._open_now(),
                self._what,
            )
