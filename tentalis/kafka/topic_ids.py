"""The records on tentalis.topic-ids.v1: Kafka's ids of the topics as they should be. Pure.

A topic that was recreated while no process ran looks like any other; only a record elsewhere tells. The keys:

- `topics`: the ids of all topics, written by `tentalis topics apply`. Every process without state compares with them at
  its start, and the admin commands always.
- `NAME/PARTITION`: the ids of the inputs and the changelog with which a stream application has worked on a partition.
  It counts where the records of `tentalis.kafka.identity` are lost together: the inputs with their committed offsets,
  and the changelog.

A value is a JSON object of topic ids by name.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tentalis.kafka.identity import LossKind, TopicIdentity, decode_sources, encode_sources

ALL_TOPICS = "topics"
"""Key of the record of all topics."""


@dataclass(frozen=True, slots=True)
class TopicIdRecords:
    """The newest record of each key.

    Attributes:
        all_topics: the ids of all topics; None without this record.
        partitions: by stream application and partition.
        unreadable: keys whose newest value is not a record.
    """

    all_topics: Mapping[str, str] | None = None
    partitions: Mapping[tuple[str, int], Mapping[str, str]] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def of(self, application: str) -> dict[int, Mapping[str, str]]:
        """The records of a stream application by partition."""
        return {partition: ids for (name, partition), ids in self.partitions.items() if name == application}


@dataclass(frozen=True, slots=True)
class LostTopic:
    """A topic that is not the recorded one: how, and what proves it."""

    topic: str
    kind: LossKind
    proof: str

    def __str__(self) -> str:
        return f"{self.topic} {self.kind} ({self.proof})"


def partition_key(application: str, partition: int) -> str:
    """The key of the record of one partition of a stream application."""
    return f"{application}/{partition}"


def encoded(ids: Mapping[str, str]) -> bytes:
    """Encodes a record."""
    return encode_sources(ids)


def records_of(found: Iterable[tuple[str | None, bytes | None]]) -> TopicIdRecords:
    """Reads keys and values in log order. A key that is not one of these records is passed over."""
    newest = dict(found)
    all_topics: Mapping[str, str] | None = None
    partitions: dict[tuple[str, int], Mapping[str, str]] = {}
    unreadable = []
    for key, value in newest.items():
        name, _, number = (key or "").rpartition("/")
        ours = key == ALL_TOPICS or (bool(name) and number.isascii() and number.isdigit())
        if not ours or value is None:
            continue
        try:
            ids = decode_sources(value)
        except ValueError:
            unreadable.append(str(key))
            continue
        if key == ALL_TOPICS:
            all_topics = ids
        else:
            partitions[name, int(number)] = ids
    return TopicIdRecords(all_topics, partitions, tuple(unreadable))


def lost(
    recorded: Mapping[str, str], names: Collection[str], topics: Mapping[str, TopicIdentity]
) -> dict[str, LostTopic]:
    """Compares the named topics with their recorded ids; returns those that are lost, by name.

    Args:
        topics: the topics that exist.
    """
    found = {}
    for name in sorted(names):
        before, there = recorded.get(name), topics.get(name)
        if before is None:
            continue
        if there is None:
            found[name] = LostTopic(name, LossKind.GONE, f"its id was {before}")
        elif there.topic_id != before:
            proof = f"its id was {before} and is {there.topic_id}"
            found[name] = LostTopic(name, LossKind.RECREATED, proof)
    return found


def to_record(
    recorded: Mapping[str, str] | None, names: Collection[str], topics: Mapping[str, TopicIdentity]
) -> dict[str, str]:
    """Returns the ids of the named topics that exist and are recorded with another id, or not at all."""
    before = recorded or {}
    ids = {name: topics[name].topic_id for name in sorted(names) if name in topics}
    return {name: topic_id for name, topic_id in ids.items() if before.get(name) != topic_id}


def moved(
    records: TopicIdRecords, ids: Mapping[str, tuple[str, str]], partitions: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """Returns the records, by key, after topics were moved to others of the same names.

    A record that does not have the id before the move keeps what it has: that topic was lost earlier.

    Args:
        ids: the id before and after the move, by topic.
        partitions: the new number of partitions, by application. A new partition has the record of an old one.
    """

    def after(recorded: Mapping[str, str]) -> dict[str, str]:
        return {
            topic: ids[topic][1] if topic in ids and ids[topic][0] == before else before
            for topic, before in recorded.items()
        }

    found = {} if records.all_topics is None else {ALL_TOPICS: after(records.all_topics)}
    for application, count in partitions.items():
        before = records.of(application)
        numbers = sorted(before)
        for partition in range(count) if numbers else ():
            recorded = before.get(partition, before[numbers[partition % len(numbers)]])
            found[partition_key(application, partition)] = after(recorded)
    return found
