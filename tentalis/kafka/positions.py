"""Positions on a partition as people name them, and the offsets that they mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Start position in every partition: an offset, the last `back` records or a time; all None is the beginning."""

    offset: int | None = None
    back: int | None = None
    at_ms: int | None = None


def begin_offset(start: Start, low: int, high: int, at_time: int | None) -> int:
    """Returns the first offset to read of a partition with [low, high); `at_time` is the broker's offset for a time."""
    if start.offset is not None:
        return min(max(start.offset, low), high)
    if start.back is not None:
        return max(low, high - start.back)
    if start.at_ms is not None:
        return high if at_time is None or at_time < 0 else at_time
    return low
