"""Recent results and waiting feedback of one partition, for feedback that names a task and no more. Pure.

What is kept are *facts*: which task a record names, where it lies, when it was appended. The records themselves stay on
their topics and are read again when somebody needs them. A fact is written once, under a key of its own, with an offset
of its own topic in front: no key is ever written by records of two topics, so "the greatest offset per key" has one
meaning. The rules and the argument why nothing is lost are in docs/feedback.md.
"""

import heapq
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from streams.processor import Change, applied_offset, payload_of, stamped

RESULTS, FEEDBACK, DISPOSED = "results/", "feedback/", "disposed"
BEGINNING = -(2**62)

_RESULT = struct.Struct(">Qqq")
_WAITING = struct.Struct(">Qq")


@dataclass(frozen=True, slots=True, order=True)
class Fact:
    """A record of one topic: its offset, its append time (ms), the hash of the task that it names."""

    offset: int
    time: int
    task: int


def task_hash(task_id: str) -> int:
    """64 bits that stand for a task. Who reads a record by its fact compares the ids."""
    return int.from_bytes(blake2b(task_id.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


@dataclass(slots=True)
class _Chunk:
    """The facts of one batch of results: one state value. `last`: offset, `newest`: append time."""

    key: str
    last: int
    newest: int


class _Index:
    """Facts of results in offset order, 24 bytes each. Found by a scan: they are many, and few are ever asked for."""

    def __init__(self) -> None:
        self._tasks, self._offsets, self._times = array("Q"), array("q"), array("q")
        self._head = 0

    def __len__(self) -> int:
        return len(self._offsets) - self._head

    @property
    def last(self) -> int:
        return self._offsets[-1] if self._offsets else -1

    def add(self, fact: Fact) -> None:
        self._tasks.append(fact.task)
        self._offsets.append(fact.offset)
        self._times.append(fact.time)

    def find(self, task: int) -> list[Fact]:
        found = np.flatnonzero(np.frombuffer(self._tasks, np.uint64)[self._head :] == np.uint64(task)) + self._head
        return [Fact(self._offsets[i], self._times[i], task) for i in found.tolist()]

    def drop(self, last: int) -> None:
        """Gives up the facts up to an offset."""
        while self._head < len(self._offsets) and self._offsets[self._head] <= last:
            self._head += 1
        if 2 * self._head > len(self._offsets):
            for column in (self._tasks, self._offsets, self._times):
                del column[: self._head]
            self._head = 0


class Recent:
    """The facts of one partition, and how far (log time) each of the two topics has been read.

    A feedback and a result of its task belong together if their append times are at most `horizon_ms` apart. The time
    of a topic is the running maximum of the append times read from it *since the partition was taken over*, never read
    from state: state may come from a worker that had got further.
    """

    def __init__(self, horizon_ms: int) -> None:
        self._horizon = horizon_ms
        self._results_time = self._feedback_time = BEGINNING
        self._index = _Index()
        self._chunks: deque[_Chunk] = deque()
        self._waiting: dict[int, Fact] = {}
        self._by_task: dict[int, dict[int, Fact]] = {}
        # Feedback read since the takeover and not yet disposed of, waiting or not, with what was restored.
        # A heap of (offset, append time).
        self._undisposed: list[tuple[int, int]] = []
        self._disposed = self._disposed_written = -1
        self._new_results: list[Fact] = []
        self._new_waiting: list[Fact] = []
        self._deleted: list[str] = []

    @property
    def results(self) -> int:
        """Results remembered."""
        return len(self._index)

    @property
    def newest(self) -> int:
        """The newest append time among the facts (ms), BEGINNING if there are none."""
        times = [chunk.newest for chunk in self._chunks] + [fact.time for fact in self._waiting.values()]
        return max(times, default=BEGINNING)

    @property
    def waiting(self) -> int:
        """Feedback that waits for a result."""
        return len(self._waiting)

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Takes over what the changelog holds; on a new object only. Raises ValueError for an entry of others."""
        facts: dict[int, Fact] = {}
        chunks: list[tuple[int, _Chunk]] = []
        for key, value in entries.items():
            try:
                if key.startswith(RESULTS):
                    chunk = [Fact(offset, time, task) for task, offset, time in _RESULT.iter_unpack(payload_of(value))]
                    facts.update((fact.offset, fact) for fact in chunk)
                    newest = max(fact.time for fact in chunk)
                    chunks.append((chunk[0].offset, _Chunk(key, chunk[-1].offset, newest)))
                elif key.startswith(FEEDBACK):
                    task, time = _WAITING.unpack(payload_of(value))
                    self._wait(Fact(applied_offset(value), time, task))
                elif key == DISPOSED:
                    self._disposed = self._disposed_written = applied_offset(value)
                else:
                    raise ValueError("unknown key")
            except (ValueError, struct.error) as error:
                raise ValueError(f"state entry {key!r} is not one of recent results and feedback: {error}") from error
        for offset in sorted(facts):
            self._index.add(facts[offset])
        self._chunks.extend(chunk for _, chunk in sorted(chunks, key=lambda each: each[0]))
        # Their halves were confirmed before this was written: what is left is an unconfirmed deletion.
        for offset in [offset for offset in self._waiting if offset <= self._disposed]:
            self._forget(offset)

    # --- time ---------------------------------------------------------------------------------------------------------

    def read_results(self, time: int) -> None:
        """The results topic has been read up to this append time."""
        self._results_time = max(self._results_time, time)

    def read_feedback(self, time: int) -> None:
        """The feedback topic has been read up to this append time."""
        self._feedback_time = max(self._feedback_time, time)

    def _due(self, time: int) -> bool:
        return time + self._horizon < self._results_time

    @property
    def overdue(self) -> bool:
        """Whether feedback is to be disposed of, or results to be forgotten."""
        due = bool(self._undisposed) and self._due(self._undisposed[0][1])
        return due or bool(self._chunks and self._forgotten(self._chunks[0]))

    def _forgotten(self, chunk: _Chunk) -> bool:
        # Twice the horizon: as long as a result can be asked for by feedback yet to be read, and as long as feedback
        # that it has answered waits, lest a later result of its sample be taken for the first.
        return chunk.newest + 2 * self._horizon < min(self._results_time, self._feedback_time)

    # --- facts --------------------------------------------------------------------------------------------------------

    def add_result(self, fact: Fact) -> None:
        """A result was read; to be called in offset order, `read_results` before."""
        if fact.offset > self._index.last:
            self._index.add(fact)
            self._new_results.append(fact)

    def add_feedback(self, fact: Fact, *, answered: bool) -> bool:
        """Feedback without its result was read, `read_feedback` before.

        Args:
            answered: no later result can belong to it.
        Returns:
            Whether it is too late for it already: nothing more can come, and it was not disposed of before.
        """
        if fact.offset <= self._disposed or fact.offset in self._waiting:
            return False
        overdue = not answered and self._due(fact.time)
        if answered or overdue:
            heapq.heappush(self._undisposed, (fact.offset, fact.time))
        else:
            self._wait(fact)
            self._new_waiting.append(fact)
        return overdue

    def _wait(self, fact: Fact) -> None:
        self._waiting[fact.offset] = fact
        self._by_task.setdefault(fact.task, {})[fact.offset] = fact
        heapq.heappush(self._undisposed, (fact.offset, fact.time))

    def results_for(self, feedback: Fact) -> list[Fact]:
        """The results that belong to a feedback, in offset order."""
        if not len(self._index):
            return []
        return [fact for fact in self._index.find(feedback.task) if abs(fact.time - feedback.time) <= self._horizon]

    def feedback_for(self, result: Fact) -> list[Fact]:
        """The waiting feedback that a result belongs to, in offset order."""
        waiting = self._by_task.get(result.task)
        if waiting is None:
            return []
        return sorted(fact for fact in waiting.values() if abs(fact.time - result.time) <= self._horizon)

    def dispose(self) -> list[Fact]:
        """The waiting feedback to which no further result can come; it waits no more.

        Its results can still be asked for until `take_changes`.
        """
        gone = []
        while self._undisposed and self._due(self._undisposed[0][1]):
            offset, _ = heapq.heappop(self._undisposed)
            fact = self._forget(offset)
            if fact is not None:
                gone.append(fact)
            self._disposed = max(self._disposed, offset)
        return gone

    def _forget(self, offset: int) -> Fact | None:
        fact = self._waiting.pop(offset, None)
        if fact is not None:
            self._deleted.append(f"{FEEDBACK}{offset}")
            of_task = self._by_task[fact.task]
            del of_task[offset]
            if not of_task:
                del self._by_task[fact.task]
        return fact

    def take_changes(self) -> list[list[Change]]:
        """What is to be written after a batch, wave by wave: facts, then how far feedback was disposed of, then
        deletions, which that justifies."""
        while self._chunks and self._forgotten(self._chunks[0]):
            chunk = self._chunks.popleft()
            self._index.drop(chunk.last)
            self._deleted.append(chunk.key)
        facts: list[Change] = [
            (f"{FEEDBACK}{fact.offset}", stamped(fact.offset, _WAITING.pack(fact.task, fact.time)))
            for fact in self._new_waiting
        ]
        if self._new_results:
            facts.append(self._chunk(self._new_results))
        disposed: list[Change] = []
        if self._deleted and self._disposed > self._disposed_written:
            disposed.append((DISPOSED, stamped(self._disposed, b"")))
            self._disposed_written = self._disposed
        deleted: list[Change] = [(key, None) for key in self._deleted]
        self._new_results, self._new_waiting, self._deleted = [], [], []
        return [wave for wave in (facts, disposed, deleted) if wave]

    def _chunk(self, facts: Sequence[Fact]) -> Change:
        # First and last offset: a key stands for the same facts for ever, however the log was cut into batches.
        last = facts[-1].offset
        key = f"{RESULTS}{facts[0].offset}-{last}"
        self._chunks.append(_Chunk(key, last, max(fact.time for fact in facts)))
        return key, stamped(last, b"".join(_packed(facts)))


def _packed(facts: Iterable[Fact]) -> Iterable[bytes]:
    return (_RESULT.pack(fact.task, fact.offset, fact.time) for fact in facts)
