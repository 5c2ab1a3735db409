"""The clock of a partition: how far its log is folded, and the stream time. Its key and encoding on the changelog."""

import struct
from collections.abc import Mapping

from streams.runtime.processor import OFFSET_BYTES, DamagedState, applied_offset, stamped

CLOCK = "clock/"
BEGINNING = -(2**63)
"""The stream time before the first record."""
HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS

_TIME = struct.Struct(">q")


class PartitionClock:
    """`applied` is the offset of the last record folded. `time` is the stream time: the running maximum of append
    times, in ms."""

    __slots__ = ("applied", "time")

    def __init__(self, applied: int = -1, time: int = BEGINNING) -> None:
        self.applied, self.time = applied, time

    def advance(self, offset: int, timestamp: int) -> None:
        """Moves the clock to a record.

        Args:
            offset: the record's offset, greater than `applied`.
            timestamp: its append time in ms. An earlier time leaves the clock's time unchanged.
        """
        self.applied = offset
        if timestamp > self.time:
            self.time = timestamp

    def restore(self, entries: Mapping[str, bytes], partition: int) -> None:
        """Restores the clock from the entries of a changelog, which may have none. Raises DamagedState."""
        value = entries.get(clock_key(partition))
        if value is not None:
            self.applied, self.time = decode_clock(value)


def clock_key(partition: int) -> str:
    """State key of a partition's clock."""
    return f"{CLOCK}{partition}"


def encode_clock(applied: int, time: int) -> bytes:
    """Encodes the value of a partition's clock."""
    return stamped(applied, _TIME.pack(time))


def decode_clock(value: bytes) -> tuple[int, int]:
    """Decodes a clock into (applied offset, stream time in ms). Raises DamagedState."""
    try:
        return applied_offset(value), int(_TIME.unpack_from(value, OFFSET_BYTES)[0])
    except (ValueError, struct.error) as error:
        raise DamagedState(f"the state has an invalid clock: {value.hex()}") from error
