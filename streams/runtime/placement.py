"""Checks that records are on the partitions of their keys."""

from streams.runtime.dlq import key_bytes
from streams.runtime.processor import LogRecord
from tentalis.kafka.partitioner import partition_of


class Misplaced(ValueError):
    """A record on a different partition than its key's."""


def check_place(record: LogRecord) -> None:
    """Checks that a record is on its key's partition. Skips records without a key or a known partition count.

    Raises:
        Misplaced: the record is on a different partition.
    """
    key = key_bytes(record.key)
    if key is None or not record.partitions:
        return
    right = partition_of(key, record.partitions)
    if right != record.partition:
        raise Misplaced(
            f"its key {record.key!r} hashes to partition {right} of {record.partitions}, but it is on partition "
            f"{record.partition}: the producer must place keys by murmur2 (librdkafka: partitioner=murmur2_random) and "
            "produce it again"
        )
