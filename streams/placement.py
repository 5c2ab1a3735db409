"""On which partition a key lies: murmur2, as the JVM's clients and ours place it (`tentalis.kafka.producer_config`).

librdkafka's own default is CRC32. What a client with that writes lies elsewhere than everything else on its task:
pairing never finds it, and a join over it would be two joins, each with a value of its own under the same key."""

import struct

from streams.dlq import key_bytes
from streams.processor import LogRecord

_SEED, _MIX, _WORD = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


class Misplaced(ValueError):
    """A record on another partition than its key's."""


def partition_of(key: bytes, partitions: int) -> int:
    """Where a key lies, of so many partitions.

    >>> partition_of(b"task-1", 8)
    3
    """
    return (_murmur2(key) & 0x7FFFFFFF) % partitions


def check_place(record: LogRecord) -> None:
    """Nothing to check in a record without a key, or of which nobody said how many partitions its topic has.

    Raises:
        Misplaced: it lies on another partition than its key's.
    """
    key = key_bytes(record.key)
    if key is None or not record.partitions:
        return
    right = partition_of(key, record.partitions)
    if right != record.partition:
        raise Misplaced(
            f"its key {record.key!r} hashes to partition {right} of {record.partitions}, it lies on {record.partition}:"
            " the producer must place keys by murmur2 (librdkafka: partitioner=murmur2_random) and produce it again"
        )


def _murmur2(key: bytes) -> int:
    # Word by word: aiokafka's takes each byte apart, and several times as long, for every task of the log.
    size = len(key)
    whole = size & ~3
    found = _SEED ^ size
    for (word,) in struct.iter_unpack("<I", key[:whole]):
        word = word * _MIX & _WORD
        word = (word ^ word >> 24) * _MIX
        found = (found * _MIX ^ word) & _WORD
    if whole < size:
        found = (found ^ int.from_bytes(key[whole:], "little")) * _MIX & _WORD
    found = (found ^ found >> 13) * _MIX & _WORD
    return int(found ^ found >> 15)
