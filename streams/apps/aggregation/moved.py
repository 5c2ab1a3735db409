"""The state of aggregation, moved to topics with more partitions. Pure.

A window belongs to no key: the part of it that an old partition has counted stays in the partition of that number, and
later records of the same keys are counted in theirs. Readers add up the partitions. Ids of events are known to every
partition to which the event's key can have moved.
"""

from collections.abc import Iterator
from dataclasses import replace

from schemas.place import RecordPlace
from streams.apps.aggregation.core import SeenEvents, TopicFold, entries_of, topic_folds
from streams.apps.aggregation.processor import TAGS
from streams.runtime.moving import Move, State, States


def places(states: States) -> Iterator[RecordPlace]:
    """Yields nothing: counts do not refer to records."""
    yield from ()


def moved(states: States, move: Move) -> dict[int, State]:
    """Returns the state of each new partition.

    After a crash between two waves of one batch, the records of that batch may be counted twice.
    """
    before = {partition: topic_folds(TAGS.values(), state) for partition, state in states.items()}
    found: dict[int, State] = {}
    for target in range(move.after):
        entries: dict[str, bytes] = {}
        for topic, tag in TAGS.items():
            folds = {partition: each[tag] for partition, each in before.items() if each[tag].applied >= 0}
            entries |= entries_of(tag, _moved(folds, move, target, move.begin[topic, target] - 1))
        found[target] = entries
    return found


def _moved(folds: dict[int, TopicFold], move: Move, target: int, applied: int) -> TopicFold:
    times = {partition: each.stream_time for partition, each in folds.items()}
    there = TopicFold(applied, move.clock(times, target) or 0)
    if target in folds:
        there.stream_time = folds[target].stream_time
        there.buckets = {window: replace(each, applied=applied) for window, each in folds[target].buckets.items()}
    known = [
        seen
        for partition, each in sorted(folds.items())
        if target in move.candidates(partition)
        for _, seen in sorted(each.chunks.items())
    ]
    # Offsets below every record: each of these events was there before.
    for first, seen in enumerate(known, -len(known)):
        there.learn(first, SeenEvents(seen.expires, dict.fromkeys(seen.ids, first)))
    return there
