"""Partition of a key: murmur2, as in the JVM clients and in ours (`tentalis.kafka.config.producer_config`).

librdkafka's default is CRC32. A client with that default writes to a different partition than all other records of the
task: pairing never finds its records, and the join would run twice, on two partitions, with two values for one key."""

import struct

TICK, FORGET = b"tentalis.Tick", b"tentalis.Forget"
ADDRESSED = frozenset({TICK, FORGET})
"""Types of records that are written to every partition, whatever their key."""
TYPE_HEADER = "ce_type"

_SEED, _MIX, _WORD = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key in a topic with `partitions` partitions.

    >>> partition_of(b"task-1", 8)
    3
    """
    return (_murmur2(key) & 0x7FFFFFFF) % partitions


def _murmur2(key: bytes) -> int:
    # Processes whole words: aiokafka's implementation goes byte by byte and takes several times as long, per record.
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
