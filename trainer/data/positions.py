"""Offsets by partition of the rollout topic, as the records name them. Pure."""

from collections.abc import Iterable, Mapping

from schemas import topics
from schemas.records import Position


def offsets_of(positions: Iterable[Position]) -> dict[int, int]:
    """Returns the offset of each partition."""
    return {position.partition: position.offset for position in positions}


def positions_of(offsets: Mapping[int, int]) -> tuple[Position, ...]:
    """The inverse of `offsets_of`, ordered by partition."""
    return tuple(Position(topic=topics.ROLLOUTS, partition=p, offset=offset) for p, offset in sorted(offsets.items()))
