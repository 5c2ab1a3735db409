"""The interface between a stream application and its runtime: no Faust, no Kafka, no clock.

An application is a `Processor`: it takes batches of log records and returns `Effects`. The adapter (`worker.py`)
carries them out in an order that loses nothing: outputs and dead letters are confirmed, then the state changes wave by
wave, then the offset is committed. After a crash in between, the same records are delivered again: repeated outputs
must be harmless, and the applied offset of a state value tells which records it includes."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from schemas.place import RecordPlace
from tentalis.dlq.context import class_of

OFFSET_BYTES = 8
"""Length of the applied offset, with which every state value begins: that of the last input record applied to it,
big-endian, signed."""

TURN = 50
"""Records of a batch that are processed before yielding to the event loop: some tens of ms."""

ERROR_CHARS = 2000
"""Length limit of the error text in a dead letter: the error may quote a key or a value of any size."""

Change = tuple[str, bytes | None]
"""(key, value) of the state table; None deletes."""


class Retryable(Exception):
    """An external service (such as a model server) is unavailable; the records are not at fault. The batch is retried
    until the service is back."""


class StateUnreadable(Exception):
    """The state on disk cannot be read; the records are not at fault. The worker ends, and its next start restores the
    state from the changelog."""


class DamagedState(StateUnreadable):
    """State that the application cannot have written: readable, but damaged or incomplete."""


# Types with one instance per log record are tuples: a frozen dataclass takes three times as long to create.


class LogRecord(NamedTuple):
    """One record of the log.

    `timestamp` is the broker's append time in ms. `key` is the raw UTF-8 key; bytes that are not UTF-8 are kept as
    surrogate escapes, so that they can be written back unchanged. A record without a value (a tombstone) has `value`
    b"" and `tombstone` set. `partitions` is the partition count of its topic, 0 if unknown."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: str | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    tombstone: bool = False
    partitions: int = 0

    def __str__(self) -> str:
        return str(RecordPlace(self.topic, self.partition, self.offset))


class OutputRecord(NamedTuple):
    """A record to produce, already encoded. `partition` None: murmur2 of the key."""

    topic: str
    key: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A record for the dead-letter topic, its bytes unchanged. `stage`: decode, validate, process, produce."""

    record: LogRecord
    stage: str
    error: str
    error_class: str

    @classmethod
    def of(cls, record: LogRecord, stage: str, error: BaseException) -> "Dead":
        """The dead letter of a record that failed with an exception."""
        text = str(error) or repr(error)
        return cls(record, stage, text if len(text) <= ERROR_CHARS else f"{text[:ERROR_CHARS]}...", class_of(error))


@dataclass(slots=True)
class Effects:
    """The effects of a batch. The waves of `changes` are written to the changelog in order: after a failure, a prefix
    of them is there."""

    outputs: list[OutputRecord] = field(default_factory=list)
    changes: list[list[Change]] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)


class Processor(Protocol):
    """A stream application.

    Calls for one partition never overlap and come in log order; during an `await` of one partition, calls for another
    may run. The input topics are co-partitioned: partition p of each shares the state of partition p."""

    app_id: str
    """The application id, which is also the consumer group."""
    topics: tuple[str, ...]
    table: str | None
    """Name of the state table, None for a stateless application."""

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Replaces the whole state of a partition: after assignment and recovery, and after a batch was abandoned
        half-way. Also called for stateless applications, with empty `entries`."""

    def revoke(self, partition: int) -> None:
        """Drops a partition; `restore` may assign it again."""

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Processes one batch: records of one topic-partition in offset order, never empty.

        May be cancelled at any await when the partition is revoked.

        Raises:
            Retryable, SchemasUnavailable: the batch is retried later; blocks the partition, dead-letters nothing.
            Unmendable: the application's configuration cannot work: the worker ends.
            StateUnreadable: the worker ends, nothing is dead-lettered; after a DamagedState the next start rebuilds the
                state from the changelog.
            Exception: the batch is retried record by record; records that fail alone go to the dead-letter topic.
        """

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Records to write without any input; called once a second with the partitions that this worker owns."""


async def in_turns(records: Sequence[LogRecord]) -> AsyncIterator[LogRecord]:
    """Yields the records of a batch and lets the event loop run in between, for a processor that awaits nothing itself:
    otherwise the batches of all partitions, one after the other, would delay commits, ticks and health by seconds."""
    for number, record in enumerate(records, 1):
        yield record
        if number % TURN == 0:
            await asyncio.sleep(0)


class StateTable(Mapping[str, bytes]):
    """State on disk as passed to `restore`: it can be read at any time instead of being loaded into memory. It includes
    the writes of all batches before the current one."""

    @abstractmethod
    def names(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, in order."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """The keys that begin with `prefix`, with their values, in order."""

    @abstractmethod
    def aged(self, since: int) -> Iterator[tuple[int, str]]:
        """(age, key) of the values with an age (see `Aged`), from `since` on, oldest first; also for former ages of a
        key."""

    @abstractmethod
    def count_aged(self) -> int:
        """The number of values with an age."""

    @abstractmethod
    def ageless(self) -> Iterator[str]:
        """The keys of the values without an age, in order, for an application with ages (see `Aged`)."""

    @abstractmethod
    def forget_ages(self, before: int) -> None:
        """Drops the index entries of ages below `before`."""


@runtime_checkable
class Aged(Protocol):
    """A processor whose state on disk is indexed by age."""

    def age(self, key: str, value: bytes) -> int | None:
        """The age that a value is ordered by, None for a value that is not indexed by age."""


@runtime_checkable
class Timed(Protocol):
    """A processor with timeouts, which fire also on partitions without input."""

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """True if `expire` has anything to do; called once a second for each owned partition.

        Args:
            at_end: input topics of which this partition is processed to its end, as of the last fetch.
        """

    async def expire(self, partition: int) -> Effects:
        """The effects of due timeouts; called between two batches of the partition.

        Raises:
            Retryable: not possible now; called again within seconds.
        """


@runtime_checkable
class Bounded(Protocol):
    """A processor with a limit on its state: at the limit, its input waits."""

    def waits(self, partition: int) -> bool:
        """True if the partition's next batch must wait. Called before each batch, repeatedly until it returns False."""

    def full(self) -> str | None:
        """The reason why all partitions wait until an operator acts; None if they do not."""


@dataclass(frozen=True, slots=True)
class LostPartition:
    """A partition whose state, or whose input, is lost.

    Attributes:
        entries: what is left of the state.
        records: the input records that the lost state included, as far as the log still has them; empty if the state is
            not lost.
        finished: the keys on `Accountable.outcomes`.
        applied: the offset before the first record that will be read.
        reason: what was lost, for people.
    """

    partition: int
    entries: Mapping[str, bytes]
    records: Iterable[LogRecord]
    finished: Collection[str]
    applied: int
    reason: str


@runtime_checkable
class Accountable(Protocol):
    """A processor that accounts for the work that is lost with its state or its input. It has one input topic."""

    outcomes: str
    """The topic whose keys tell which work is finished."""

    def give_up(self, lost: LostPartition) -> Effects:
        """The records that account for the lost work, and as changes the whole state that is left. Blocks."""


@runtime_checkable
class Stepwise(Protocol):
    """A processor that shows its progress within a batch, for batches that may take long."""

    @property
    def steps(self) -> int:
        """The number of completed external calls."""

    def asking(self, partition: int) -> bool:
        """True if the partition's batch waits for external calls, or for a free call slot."""


def stamped(offset: int, payload: bytes) -> bytes:
    """A state value: the applied offset, then `payload`.

    >>> applied_offset(stamped(7, b"x")), payload_of(stamped(7, b"x"))
    (7, b'x')
    """
    return offset.to_bytes(OFFSET_BYTES, "big", signed=True) + payload


def applied_offset(value: bytes) -> int:
    """The offset of the last input record applied to a state value. Raises ValueError for a value without one."""
    if len(value) < OFFSET_BYTES:
        raise ValueError(
            f"a state value of {len(value)} bytes has no applied offset, which takes its first {OFFSET_BYTES} bytes"
        )
    return int.from_bytes(value[:OFFSET_BYTES], "big", signed=True)


def payload_of(value: bytes) -> bytes:
    """A state value without its applied offset."""
    return value[OFFSET_BYTES:]
