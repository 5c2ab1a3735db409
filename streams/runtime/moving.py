"""The move of an application's state to topics with more partitions. Pure.

The records of a key move to another partition, at another offset, and the state of the key moves with them. An
application that has state has a module `moved` with two functions:

- `places(states)`: the records that the state needs again, so that the copy notes where they are then;
- `moved(states, move)`: the state of each new partition, made of the states of the old ones.

`states` maps the old partitions to the entries of their changelogs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from schemas.place import RecordPlace
from streams.runtime.processor import applied_offset, payload_of, stamped
from tentalis.kafka.partitioner import partition_of

State = Mapping[str, bytes]
States = Mapping[int, State]


class NotMoved(Exception):
    """The state refers to a record that is no longer on its topic, so it cannot be moved."""


@dataclass(frozen=True, slots=True)
class Move:
    """The old and the new partitions, as one application sees them.

    Attributes:
        before: the number of partitions of the state.
        after: the new number of partitions.
        places: the new place of each record in `places`, and of each record that is not processed yet.
        consumed: per topic and old partition, the first offset that the application has not processed.
        begin: per topic and new partition, the first offset that it must read.
    """

    before: int
    after: int
    places: Mapping[RecordPlace, RecordPlace]
    consumed: Mapping[tuple[str, int], int]
    begin: Mapping[tuple[str, int], int]

    def place(self, topic: str, partition: int, offset: int) -> RecordPlace:
        """Returns the new place of a record. Raises NotMoved."""
        found = self.places.get(RecordPlace(topic, partition, offset))
        if found is None:
            raise NotMoved(
                f"the state of partition {partition} refers to {topic}[{partition}]@{offset}, which is no longer "
                "there. Start the application with the present number of partitions until it has processed its input"
            )
        return found

    def partition_of(self, key: str) -> int:
        """Returns the new partition of a key."""
        return partition_of(key.encode("utf-8", "surrogateescape"), self.after)

    def candidates(self, partition: int) -> range:
        """Returns the new partitions that the keys of an old partition can be on. For state that does not contain
        its key, so that `partition_of` cannot be used."""
        step = gcd(self.before, self.after)
        return range(partition % step, self.after, step)

    def stamp(self, topic: str, partition: int, target: int, value: bytes) -> bytes:
        """Returns a state value with its applied offset in the new partition `target`: that of the same record if the
        application will read it again, else that of the last record that it will not read."""
        applied = applied_offset(value)
        before = self.begin[topic, target] - 1
        if applied >= self.consumed.get((topic, partition), 0):
            there = self.place(topic, partition, applied)
            before = max(before, there.offset) if there.partition == target else before
        return stamped(before, payload_of(value))

    def clock(self, times: Mapping[int, int], target: int) -> int | None:
        """Returns the stream time of a new partition: the smallest stream time of the old partitions that its keys
        come from. A greater one could be ahead of records that are still to be read. None if none of the old
        partitions has a stream time."""
        return min((time for partition, time in times.items() if target in self.candidates(partition)), default=None)


class MovableApplication(Protocol):
    """The module `moved` of an application."""

    def places(self, states: States) -> Iterable[RecordPlace]:
        """Returns the records that the state needs again."""

    def moved(self, states: States, move: Move) -> Mapping[int, State]:
        """Returns the state of each new partition. Raises NotMoved, DamagedState."""
