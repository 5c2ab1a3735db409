"""The new partitions of a record. Pure."""

from collections.abc import Sequence
from typing import Protocol

from schemas import topics
from tentalis.kafka.partitioner import ADDRESSED, FORGET, TYPE_HEADER, partition_of

LETTERS = topics.dlq("")

Headers = Sequence[tuple[str, bytes | None]]


class StoredRecord(Protocol):
    """A record on the log, as confluent-kafka returns it."""

    def key(self) -> bytes | None: ...
    def partition(self) -> int | None: ...


def targets(
    topic: str, record: StoredRecord, headers: Headers, before: int, after: int, *, unread: bool
) -> Sequence[int]:
    """Returns the partitions of a record when its topic has `after` partitions; `before` is their number until now.

    A keyed record goes to the partition of its key. Dead letters, and records without a key, stay on theirs. Clock
    ticks and requests to forget, which each partition has, are also on the new ones. An unread request goes to all: the
    keys of its partition can be on any of them, and the request may have been read on another partition already.

    Args:
        unread: some consumer group has not processed the record.
    """
    partition, key = int(record.partition() or 0), record.key()
    kind = next((value for name, value in headers if name == TYPE_HEADER), None)
    if kind in ADDRESSED and not topic.endswith(LETTERS):
        return range(after) if kind == FORGET and unread else range(partition, after, before)
    if key is None or topic.endswith(LETTERS):
        return (partition,)
    return (partition_of(key, after),)
