"""Recent results and waiting feedback of one partition, for feedback that names only a task. Pure.

The state holds *offset references*: the task that a record names, its offset, its append time. The records stay on
their topics and are read again when needed. A reference is written once, under a separate key, behind an offset of its
topic: records of two topics never write the same key, so "the greatest offset per key" has one meaning. The rules, and
the argument that nothing is lost, are in docs/concepts/feedback.md.
"""

import heapq
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streams.runtime.processor import Change, applied_offset, payload_of, stamped

RESULTS, FEEDBACK, DISPOSED = "results/", "feedback/", "disposed"
BEGINNING = -(2**62)

_RESULT = struct.Struct(">Qqq")
_WAITING = struct.Struct(">Qq")


@dataclass(frozen=True, slots=True, order=True)
class OffsetRef:
    """An offset reference to a record of one topic: its offset, its append time (ms), the hash of the task that it
    names."""

    offset: int
    time: int
    task: int


@dataclass(slots=True)
class _Chunk:
    """The references of one batch of results: one state value. `last`: offset, `newest`: append time."""

    key: str
    last: int
    newest: int


class _ResultIndex:
    """References to results in offset order, 24 bytes each. Look-up is a scan: there are many, and few are ever looked
    up."""

    def __init__(self) -> None:
        self._tasks, self._offsets, self._times = array("Q"), array("q"), array("q")
        self._head = 0

    def __len__(self) -> int:
        return len(self._offsets) - self._head

    @property
    def last(self) -> int:
        return self._offsets[-1] if self._offsets else -1

    def add(self, ref: OffsetRef) -> None:
        self._tasks.append(ref.task)
        self._offsets.append(ref.offset)
        self._times.append(ref.time)

    def find(self, task: int) -> list[OffsetRef]:
        found = np.flatnonzero(np.frombuffer(self._tasks, np.uint64)[self._head :] == np.uint64(task)) + self._head
        return [OffsetRef(self._offsets[i], self._times[i], task) for i in found.tolist()]

    def drop(self, last: int) -> None:
        """Drops the references up to an offset."""
        while self._head < len(self._offsets) and self._offsets[self._head] <= last:
            self._head += 1
        if 2 * self._head > len(self._offsets):
            for column in (self._tasks, self._offsets, self._times):
                del column[: self._head]
            self._head = 0


class RecentResults:
    """The offset references of one partition, and the log time up to which each of the two topics has been read.

    A feedback and a result of its task belong together if their append times are at most `horizon_ms` apart. The time
    of a topic is the running maximum of the append times read from it *since the partition was taken over*. It is never
    read from state, which may come from a worker that had read further.
    """

    def __init__(self, horizon_ms: int) -> None:
        self._horizon = horizon_ms
        self._results_time = self._feedback_time = BEGINNING
        self._index = _ResultIndex()
        self._chunks: deque[_Chunk] = deque()
        self._waiting: dict[int, OffsetRef] = {}
        self._by_task: dict[int, dict[int, OffsetRef]] = {}
        # Feedback not yet disposed of, waiting or not: read since the takeover, or restored.
        # A heap of (offset, append time).
        self._undisposed: list[tuple[int, int]] = []
        self._disposed = self._disposed_written = -1
        self._new_results: list[OffsetRef] = []
        self._new_waiting: list[OffsetRef] = []
        self._deleted: list[str] = []

    @property
    def results(self) -> int:
        """Number of results remembered."""
        return len(self._index)

    @property
    def newest(self) -> int:
        """The newest append time among the references (ms), BEGINNING if there are none."""
        times = [chunk.newest for chunk in self._chunks] + [ref.time for ref in self._waiting.values()]
        return max(times, default=BEGINNING)

    @property
    def waiting(self) -> int:
        """Number of feedback records that wait for a result."""
        return len(self._waiting)

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Restores a partition from its changelog. Call it on a new object only. Raises ValueError for an entry that
        this code did not write."""
        refs: dict[int, OffsetRef] = {}
        chunks: list[tuple[int, _Chunk]] = []
        for key, value in entries.items():
            try:
                if key.startswith(RESULTS):
                    chunk = list(_results(value))
                    refs.update((ref.offset, ref) for ref in chunk)
                    newest = max(ref.time for ref in chunk)
                    chunks.append((chunk[0].offset, _Chunk(key, chunk[-1].offset, newest)))
                elif key.startswith(FEEDBACK):
                    self._wait(_feedback(value))
                elif key == DISPOSED:
                    self._disposed = self._disposed_written = applied_offset(value)
                else:
                    raise ValueError("unknown key")
            except (ValueError, struct.error) as error:
                raise ValueError(f"state entry {key!r} is not a valid result or feedback: {error}") from error
        for offset in sorted(refs):
            self._index.add(refs[offset])
        self._chunks.extend(chunk for _, chunk in sorted(chunks, key=lambda each: each[0]))
        # Their halves were confirmed before DISPOSED was written: only their deletion is unconfirmed.
        for offset in [offset for offset in self._waiting if offset <= self._disposed]:
            self._forget(offset)

    # --- time ---------------------------------------------------------------------------------------------------------

    def read_results(self, time: int) -> None:
        """Marks the results topic as read up to this append time."""
        self._results_time = max(self._results_time, time)

    def read_feedback(self, time: int) -> None:
        """Marks the feedback topic as read up to this append time."""
        self._feedback_time = max(self._feedback_time, time)

    def _due(self, time: int) -> bool:
        return time + self._horizon < self._results_time

    @property
    def overdue(self) -> bool:
        """True if there is feedback to dispose of or there are results to forget."""
        due = bool(self._undisposed) and self._due(self._undisposed[0][1])
        return due or bool(self._chunks and self._forgotten(self._chunks[0]))

    def _forgotten(self, chunk: _Chunk) -> bool:
        # Twice the horizon: feedback yet to be read may need a result for that long, and feedback that the result has
        # answered waits for that long. Without the result, a later one of its sample would be taken for the first.
        return chunk.newest + 2 * self._horizon < min(self._results_time, self._feedback_time)

    # --- references ---------------------------------------------------------------------------------------------------

    def add_result(self, ref: OffsetRef) -> None:
        """Adds a result that was read. Call it in offset order, after `read_results`."""
        if ref.offset > self._index.last:
            self._index.add(ref)
            self._new_results.append(ref)

    def add_feedback(self, ref: OffsetRef, *, answered: bool) -> bool:
        """Adds feedback that was read without its result. Call it after `read_feedback`.

        Args:
            answered: no later result can belong to it.
        Returns:
            True if it is too late already: no result can come any more, and it was not disposed of before.
        """
        if ref.offset <= self._disposed or ref.offset in self._waiting:
            return False
        overdue = not answered and self._due(ref.time)
        if answered or overdue:
            heapq.heappush(self._undisposed, (ref.offset, ref.time))
        else:
            self._wait(ref)
            self._new_waiting.append(ref)
        return overdue

    def _wait(self, ref: OffsetRef) -> None:
        self._waiting[ref.offset] = ref
        self._by_task.setdefault(ref.task, {})[ref.offset] = ref
        heapq.heappush(self._undisposed, (ref.offset, ref.time))

    def results_for(self, feedback: OffsetRef) -> list[OffsetRef]:
        """Returns the results that belong to a feedback, in offset order."""
        if not len(self._index):
            return []
        return [ref for ref in self._index.find(feedback.task) if abs(ref.time - feedback.time) <= self._horizon]

    def feedback_for(self, result: OffsetRef) -> list[OffsetRef]:
        """Returns the waiting feedback to which a result belongs, in offset order."""
        waiting = self._by_task.get(result.task)
        if waiting is None:
            return []
        return sorted(ref for ref in waiting.values() if abs(ref.time - result.time) <= self._horizon)

    def dispose(self) -> list[OffsetRef]:
        """Removes and returns the waiting feedback to which no further result can come.

        Its results can still be looked up until `take_changes`.
        """
        gone = []
        while self._undisposed and self._due(self._undisposed[0][1]):
            offset, _ = heapq.heappop(self._undisposed)
            ref = self._forget(offset)
            if ref is not None:
                gone.append(ref)
            self._disposed = max(self._disposed, offset)
        return gone

    def _forget(self, offset: int) -> OffsetRef | None:
        ref = self._waiting.pop(offset, None)
        if ref is not None:
            self._deleted.append(f"{FEEDBACK}{offset}")
            of_task = self._by_task[ref.task]
            del of_task[offset]
            if not of_task:
                del self._by_task[ref.task]
        return ref

    def take_changes(self) -> list[list[Change]]:
        """Returns the state changes to write after a batch, in waves: references, then the offset up to which feedback
        was disposed of, then the deletions that this offset justifies."""
        while self._chunks and self._forgotten(self._chunks[0]):
            chunk = self._chunks.popleft()
            self._index.drop(chunk.last)
            self._deleted.append(chunk.key)
        refs: list[Change] = [
            (f"{FEEDBACK}{ref.offset}", stamped(ref.offset, _WAITING.pack(ref.task, ref.time)))
            for ref in self._new_waiting
        ]
        if self._new_results:
            refs.append(self._chunk(self._new_results))
        disposed: list[Change] = []
        if self._deleted and self._disposed > self._disposed_written:
            disposed.append((DISPOSED, stamped(self._disposed, b"")))
            self._disposed_written = self._disposed
        deleted: list[Change] = [(key, None) for key in self._deleted]
        self._new_results, self._new_waiting, self._deleted = [], [], []
        return [wave for wave in (refs, disposed, deleted) if wave]

    def _chunk(self, refs: Sequence[OffsetRef]) -> Change:
        # With first and last offset, a key always stands for the same references, however the log is cut into batches.
        last = refs[-1].offset
        key = f"{RESULTS}{refs[0].offset}-{last}"
        self._chunks.append(_Chunk(key, last, max(ref.time for ref in refs)))
        return key, stamped(last, b"".join(_packed(refs)))


def offset_refs(entries: Mapping[str, bytes]) -> Iterator[tuple[str, OffsetRef]]:
    """Yields the references in the state of a partition, each with its kind: RESULTS, or FEEDBACK that waits."""
    disposed = applied_offset(entries[DISPOSED]) if DISPOSED in entries else -1
    for key, value in entries.items():
        if key.startswith(RESULTS):
            yield from ((RESULTS, ref) for ref in _results(value))
        elif key.startswith(FEEDBACK) and (ref := _feedback(value)).offset > disposed:
            yield FEEDBACK, ref


def _results(value: bytes) -> Iterator[OffsetRef]:
    for task, offset, time in _RESULT.iter_unpack(payload_of(value)):
        yield OffsetRef(offset, time, task)


def _feedback(value: bytes) -> OffsetRef:
    task, time = _WAITING.unpack(payload_of(value))
    return OffsetRef(applied_offset(value), time, task)


def _packed(refs: Iterable[OffsetRef]) -> Iterable[bytes]:
    return (_RESULT.pack(ref.task, ref.offset, ref.time) for ref in refs)
