"""The plan of a move, and its record on the broker once the old topics may be deleted. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from schemas import topics

SUFFIX = ".repartition"
MARKER = f"{topics.PREFIX}-repartition"
"""Topic of the record of an unfinished move: it exists from the first deletion until the move is done."""


@dataclass(frozen=True, slots=True)
class TopicMove:
    """A topic to move, and its checked copy.

    Attributes:
        topic_id: Kafka's id of the old topic.
        replication: replicas of each partition.
        config: the settings that were set for the topic.
        ends: the ends of the old topic's partitions when it was copied.
        counts, digests: of the copy's partitions.
    """

    name: str
    topic_id: str
    replication: int
    config: Mapping[str, str]
    ends: Sequence[int]
    counts: Sequence[int]
    digests: Sequence[str]

    @property
    def copy(self) -> str:
        """The topic that holds the copy."""
        return self.name + SUFFIX


@dataclass(frozen=True, slots=True)
class UnfinishedMove:
    """A move whose copies are complete. `begin`: per consumer group and topic, the offset at which the group
    continues in each partition. `done`: the topics are made, and the copies are not needed any more."""

    partitions: int
    topics: Sequence[TopicMove]
    begin: Mapping[str, Mapping[str, Sequence[int]]]
    done: bool = False

    def encode(self) -> bytes:
        """Encodes the move for its record."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> "UnfinishedMove":
        """Decodes `encode`. Raises ValueError, KeyError, TypeError."""
        fields = json.loads(value)
        return cls(**fields | {"topics": [TopicMove(**each) for each in fields["topics"]]})
