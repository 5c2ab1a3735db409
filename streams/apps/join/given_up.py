"""Accounts for the tasks of a partition whose state or input was lost: an outcome for each open one. Pure.

What is left of the state and of the log tells which tasks were open. Each sample that has no outcome yet gets one that
says that it was given up, and every task is remembered as closed, so that later halves cannot open it again.
"""

from collections.abc import Container, Mapping
from typing import NamedTuple

from schemas.records import Forget, Hint, Open, Record, Score, TaskHead
from streams.apps.join import emit
from streams.apps.join.state import (
    HALF,
    TASK,
    JoinState,
    Phase,
    answers_terms,
    decode_task,
    encode_task,
    phase_and_since,
)
from streams.fold.clock import BEGINNING, CLOCK, PartitionClock, clock_key, decode_clock, encode_clock
from streams.fold.forgotten import FORGET, FORGET_TTL_MS, Forgotten
from streams.runtime.processor import Change, payload_of, stamped


class SeenOn(NamedTuple):
    """A record on the log that opened a task: its offset and its bytes."""

    offset: int
    value: bytes


class LossAccount:
    """The tasks of one partition, collected from what is left of its state and its log."""

    def __init__(self, partition: int, forget_ttl_ms: int = FORGET_TTL_MS) -> None:
        self.time = BEGINNING
        """Stream time: the greatest append time that is known."""
        self.seen: dict[str, SeenOn] = {}
        """The first record of each open task that is still on the log."""
        self._partition, self._forget_ttl_ms = partition, forget_ttl_ms
        self._forgotten = Forgotten(partition, forget_ttl_ms)
        self._open: dict[str, TaskHead] = {}
        self._closed: dict[str, bytes] = {}
        self._requests: list[tuple[int, Forget]] = []

    def add_state(self, entries: Mapping[str, bytes]) -> None:
        """Takes what is left of the state. Raises DamagedState."""
        for key, value in entries.items():
            if key.startswith(CLOCK):
                self.time = max(self.time, decode_clock(value)[1])
            elif key.startswith(FORGET):
                self._requests.append(Forgotten.decode(value))
            elif key.startswith(TASK):
                task_id = key[len(TASK) :]
                if phase_and_since(value)[0] is Phase.CLOSED:
                    self._closed[task_id] = payload_of(value)
                elif phase_and_since(value)[0] is Phase.OPEN:
                    self._open[task_id] = decode_task(value).parsed_head()
            else:
                assert key.startswith(HALF), key

    def add_record(self, record: Record, seen: SeenOn, timestamp: int) -> None:
        """Takes a record that the lost state included."""
        self.time = max(self.time, timestamp)
        if isinstance(record, Forget) and record.asks:
            self._requests.append((self.time, record))
            self._forgotten.remember(seen.offset, self.time, record)
        opened = _opens(record)
        if opened is not None:
            head, at = opened
            if not self._forgotten.concerns(head, min(at, self.time), seen.offset):
                self._open.setdefault(head.task_id, head)
                self.seen.setdefault(head.task_id, seen)

    def given_up(self, finished: Container[str], reason: str) -> list[emit.Emission]:
        """Returns the outcomes of the samples that have none; `finished` are the keys of the outcomes on the log."""
        return [
            emission
            for task_id, head in sorted(self._open.items())
            if task_id not in self._closed
            for emission in emit.given_up(head, reason, max(self.time, 0))
            if emission.outcome.key not in finished
        ]

    def state(self, applied: int) -> list[list[Change]]:
        """Returns the state that is left, in waves: every task closed, the requests to forget, and the clock at
        `applied`, after which the log is read."""
        headers: list[Change] = [
            (TASK + task_id, stamped(applied, payload)) for task_id, payload in self._closed.items()
        ]
        for task_id, head in self._open.items():
            if task_id not in self._closed:
                closed = JoinState(applied, Phase.CLOSED, self.time, head.n_samples)
                headers.append((TASK + task_id, encode_task(closed)))
        requests = Forgotten(self._partition, self._forget_ttl_ms)
        # Their offsets on the log are gone: any distinct ones before the next record keep their meaning.
        for before, (at, request) in enumerate(self._requests):
            headers.append(requests.remember(applied - before, at, request))
        clock = PartitionClock(applied, self.time)
        return [headers, [(clock_key(self._partition), encode_clock(clock.applied, clock.time))]]


def _opens(record: Record) -> tuple[TaskHead, int] | None:
    """Returns the task that a record opens in the join and its opening time (ms), None for a record that opens none."""
    if isinstance(record, Open):
        return record.head, record.opened_at
    if isinstance(record, Score | Hint) and answers_terms(record):
        return record.sample.head, record.opened_at
    return None
