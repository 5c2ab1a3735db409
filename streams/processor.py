"""The seam between a stream application and what runs it: no Faust, no Kafka, no clock.

An application is a `Processor`: it is handed batches of log records and answers with `Effects`. The adapter
(`streams.app`) carries them out in an order that loses nothing: outputs and dead letters confirmed, then the state
changes wave by wave, then the commit. After a crash in between, the same records come again: outputs must be harmless
when repeated, and state says with its applied offset what it has seen."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from schemas.place import Place
from tentalis.dlq.context import class_of

OFFSET_BYTES = 8
"""Every state value begins with its applied offset: big-endian, signed, of the last input record applied to it."""

TURN = 50
"""Records of a batch that are processed before the others on the event loop have their turn: some tens of ms."""

ERROR_CHARS = 2000
"""Of an error's text as it is logged with a dead letter: it may quote a key or a value of any size."""

Change = tuple[str, bytes | None]
"""(key, value) of the state table; None deletes."""


class Retryable(Exception):
    """Nothing is wrong with the records: something outside is away (a model server). The batch is tried again until it
    is back."""


class StateUnreadable(Exception):
    """The state on disk cannot be read. Nothing is wrong with the records, and nothing can be done about them here: the
    worker ends, and starts again with what the changelog says."""


class StateError(StateUnreadable):
    """State that cannot be what the application wrote: it was read, but is damaged, or a part of it is missing."""


# Tuples where there is one for every record of the log: a frozen dataclass takes three times as long to make.


class LogRecord(NamedTuple):
    """One record as it lies on the log.

    `timestamp` is in ms, as the broker stamped it when it was appended. `key` is the raw UTF-8 key; bytes that are no
    UTF-8 are kept as surrogate escapes, so that they can be written back unchanged. A record without a value (a
    tombstone) has `value` b"" and `tombstone` set. `partitions` is how many its topic has, 0 where nobody looked."""

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
        return str(Place(self.topic, self.partition, self.offset))


class Output(NamedTuple):
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
        """The dead letter that an exception makes of a record."""
        text = str(error) or repr(error)
        return cls(record, stage, text if len(text) <= ERROR_CHARS else f"{text[:ERROR_CHARS]}...", class_of(error))


@dataclass(slots=True)
class Effects:
    """What a batch brings about. The waves of `changes` reach the changelog in order: whatever of them does is
    a beginning."""

    outputs: list[Output] = field(default_factory=list)
    changes: list[list[Change]] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)


class Processor(Protocol):
    """A stream application.

    Calls for one partition never overlap and come in log order; between an `await` of one partition, calls for another
    may run. The input topics are co-partitioned: partition p of each shares the state of partition p."""

    app_id: str
    """Also the consumer group."""
    topics: tuple[str, ...]
    table: str | None
    """Name of the state table, None for a stateless application."""

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """The whole state of a partition, replacing what is there: after assignment and recovery, and whenever a batch
        was given up half-way. Called for stateless applications too, with nothing in it."""

    def revoke(self, partition: int) -> None:
        """The partition is gone; it may come back with `restore`."""

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """One batch: records of one topic-partition in offset order, never empty.

        May be cancelled at any await when the partition is taken away.

        Raises:
            Retryable, SchemasUnavailable: try this batch again later; blocks the partition, dead-letters nothing.
            Unmendable: it is set up so that it cannot work: the worker ends.
            StateUnreadable: the worker ends, nothing is dead-lettered; after a StateError its state is made anew from
                the changelog when it starts again.
            Exception: the batch is tried again record by record; what fails alone goes to the dead-letter topic.
        """

    def ticks(self, partitions: Sequence[int]) -> Sequence[Output]:
        """Once a second, with the partitions this worker owns: records to write beside any input."""


async def in_turns(records: Sequence[LogRecord]) -> AsyncIterator[LogRecord]:
    """The records of a batch, for a processor that has nothing to wait for: whole batches of all partitions one after
    the other would keep commits, ticks and health waiting for seconds."""
    for number, record in enumerate(records, 1):
        yield record
        if number % TURN == 0:
            await asyncio.sleep(0)


class Table(Mapping[str, bytes]):
    """What `restore` is given if the state lies on disk: it need not be taken into memory, but can be read whenever it
    is needed. It shows what the batches before the one at hand have written."""

    @abstractmethod
    def names(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, in order."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Keys that begin with `prefix` with their values, in order."""

    @abstractmethod
    def aged(self, since: int) -> Iterator[tuple[int, str]]:
        """(age, key) of the values that were given one (see `Aged`), from `since` on, oldest first; also of ages that a
        key had once and has no more."""

    @abstractmethod
    def count_aged(self) -> int:
        """How many values have an age."""

    @abstractmethod
    def ageless(self) -> Iterator[str]:
        """The keys of the values that have none, in order; of an application that gives ages (see `Aged`)."""

    @abstractmethod
    def forget_ages(self, before: int) -> None:
        """Nobody asks for ages before this any more."""


@runtime_checkable
class Aged(Protocol):
    """What a processor has besides if state on disk is to be found by its age."""

    def age(self, key: str, value: bytes) -> int | None:
        """What a value is ordered by, None for one that is not looked for by age."""


@runtime_checkable
class Timed(Protocol):
    """What a processor has besides if time alone gives it something to do, also on partitions without input."""

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Once a second for each owned partition: whether `expire` has anything to do.

        Args:
            at_end: input topics of which this partition is processed to its end, as of the last fetch.
        """

    async def expire(self, partition: int) -> Effects:
        """What is due, between two batches of the partition.

        Raises:
            Retryable: not now; asked again within seconds.
        """


@runtime_checkable
class Bounded(Protocol):
    """What a processor has besides if it holds no more than it was allowed to: then the input waits."""

    def waits(self, partition: int) -> bool:
        """Whether a partition is not to be read on now. Asked before each batch, and until it says no."""

    def full(self) -> str | None:
        """Why no partition is read on until somebody does something; None if that is not so."""


@runtime_checkable
class Stepwise(Protocol):
    """What a processor has besides if one batch may take long: a sign that it gets on."""

    @property
    def steps(self) -> int:
        """Grows with every call to the outside that is over."""

    def asking(self, partition: int) -> bool:
        """Whether the batch of a partition waits for such calls, or for their turn among those of all partitions."""


def stamped(offset: int, payload: bytes) -> bytes:
    """A state value: `payload` behind its applied offset.

    >>> applied_offset(stamped(7, b"x")), payload_of(stamped(7, b"x"))
    (7, b'x')
    """
    return offset.to_bytes(OFFSET_BYTES, "big", signed=True) + payload


def applied_offset(value: bytes) -> int:
    """The offset of the last input record applied to a state value. Raises ValueError for a value without one."""
    if len(value) < OFFSET_BYTES:
        raise ValueError(
            f"a state value of {len(value)} bytes has no applied offset: it must begin with {OFFSET_BYTES}"
        )
    return int.from_bytes(value[:OFFSET_BYTES], "big", signed=True)


def payload_of(value: bytes) -> bytes:
    """A state value without its applied offset."""
    return value[OFFSET_BYTES:]
