"""The letters that the dead-letter topics have already, by record: those that a restart does not write again, and the
records that an operator skipped (`tentalis groups skip`), which their reader passes over.

A letter is appended after its record. So the first question about a partition reads its dead-letter partition once,
from the append time of the record on; afterwards only this process writes letters for it. This is complete also if the
previous process was killed. Two processes that read a partition at the same time (a frozen one that wakes up, the
trainers of two policies) may still write a letter each: these count as copies of one letter.
"""

from dataclasses import dataclass
from typing import Protocol

from schemas import topics
from schemas.place import RecordPlace
from tentalis.dlq.actions import raw_of
from tentalis.dlq.context import SKIPPED
from tentalis.dlq.records import letter_of, mark_of
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.offsets import offsets_at
from tentalis.service.settings import Settings

CLOCKS_MS = 3_600_000
"""The greatest difference between the clocks of the brokers and of the processes that write letters."""


class LogPlace(Protocol):
    """A record on the log, as any reader holds it. `timestamp`: append time in ms."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KnownLetters:
    """The letters of a partition for records appended at `since` (ms) or later, by the record's letter id."""

    since: int
    written: frozenset[str]
    skipped: frozenset[str]


def letter_id(record: LogPlace) -> str:
    """Returns the id of a record's letter. It holds the append time, so a recreated topic has other ids."""
    return f"{RecordPlace(record.topic, record.partition, record.offset)}/{record.timestamp}"


def read_letters(settings: Settings, topic: str, partition: int, since: int) -> KnownLetters:
    """Reads the letters of a partition's records that were appended at `since` or later. Raises NoSuchTopic, Forbidden,
    KafkaException, TimeoutError."""
    name = topics.dlq(topic)
    start = offsets_at(settings, name, since - CLOCKS_MS).get(partition)
    written: set[str] = set()
    skipped: set[str] = set()
    if start is not None:
        for message in messages_to_end(settings, name, start={partition: start}, end={partition: 1 << 62}):
            raw = raw_of(message)
            if mark_of(raw) is None:
                letter = letter_of(raw)
                (skipped if letter.stage == SKIPPED else written).add(letter.id)
    return KnownLetters(since, frozenset(written | skipped), frozenset(skipped))


class WrittenLetters:
    """The dead letters that one process has found on the dead-letter topics. Call `forget` when partitions are
    assigned, because another process may have written letters since."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[tuple[str, int], KnownLetters] = {}

    def covers(self, record: LogPlace) -> bool:
        """True if the questions about a record need no reading."""
        known = self._known.get((record.topic, record.partition))
        return known is not None and known.since <= record.timestamp

    def look_up(self, record: LogPlace) -> KnownLetters:
        """Reads the letters of the record's partition, if that is still needed. Raises the errors of `read_letters`."""
        place = record.topic, record.partition
        if not self.covers(record):
            self._known[place] = read_letters(self._settings, *place, record.timestamp)
        return self._known[place]

    def has(self, record: LogPlace) -> bool:
        """True if the record has a letter."""
        return letter_id(record) in self.look_up(record).written

    def has_skips(self, topic: str, partition: int) -> bool:
        """True if an operator skipped any of the records of a partition that was looked up."""
        known = self._known.get((topic, partition))
        return known is not None and bool(known.skipped)

    def skipped(self, record: LogPlace) -> bool:
        """True if an operator skipped the record."""
        skipped = self.look_up(record).skipped
        return bool(skipped) and letter_id(record) in skipped

    def forget(self) -> None:
        """Forgets what was read, so that it is read again."""
        self._known = {}
