"""Reads and writes tentalis.topic-ids.v1, and compares its record of all topics with the broker (`topic_ids` decides).

`topics apply` writes the record of all topics; nobody else changes it but `topics delete` and `topics repartition`.
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schemas import topics
from tentalis.kafka import topic_ids
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.identity import LossKind, PartitionLoss, TopicLost
from tentalis.kafka.loss_audit import ADMIN, loss_audit, record_begun
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_client import TopicClient, asked_again
from tentalis.kafka.topic_ids import ALL_TOPICS, LostTopic, TopicIdRecords
from tentalis.kafka.topology import topic_table
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

SOURCE = ADMIN
RECORD_PATIENCE_S = 10.0
"""Seconds within which `topics apply` writes the record after it has created the topics."""
RETRY_S = 0.3
WAYS_ON = (
    "What to do: restore the topic from a backup with its id; or continue without its records: `tentalis topics apply "
    "--accept-loss` records the topics as they are now, and writes what is given up to tentalis.audit.v1 "
    "(docs/operations/lost-topics.md)"
)


class NoTopicIds(NoSuchTopic):
    """The record of all topics does not exist or cannot be read."""


def recorded_names() -> list[str]:
    """The topics in the record of all topics: those of the product, but for the one that holds the record."""
    return sorted(topic_table().topics.keys() - {topics.TOPIC_IDS})


def read_topic_ids(settings: Settings) -> TopicIdRecords:
    """Returns the records; none if the topic does not exist. Raises Forbidden, KafkaException, TimeoutError."""
    try:
        found = asked_again(lambda: [(each.key, each.value) for each in read_to_end(settings, topics.TOPIC_IDS)])
    except NoSuchTopic:
        return TopicIdRecords()
    records = topic_ids.records_of(found)
    if records.unreadable:
        log.warning(
            "%s: the records %s are not JSON objects of topic ids and count as missing",
            topics.TOPIC_IDS,
            ", ".join(records.unreadable),
        )
    return records


def write_topic_ids(settings: Settings, source: str, records: Mapping[str, Mapping[str, str]]) -> None:
    """Writes records by key. Raises DeliveryFailed, Forbidden."""
    publisher = Publisher(settings, source, make_codec(settings))
    for key, ids in records.items():
        publisher.send_bytes(topics.TOPIC_IDS, key.encode(), topic_ids.encoded(ids))
    publisher.flush()


@dataclass(frozen=True, slots=True)
class RecordedTopics:
    """The result of `record_topics`: the topics whose recorded id was given up; `first`: there was no record."""

    given_up: tuple[LostTopic, ...] = ()
    first: bool = False

    def warning(self, existed: int) -> str | None:
        """Warns if the record begins with topics that existed before; `existed`: their number."""
        if not self.first or not existed:
            return None
        return (
            f"{topics.TOPIC_IDS} is new, or was lost: it takes the {existed} topics that were there as they are. One "
            "that was deleted and created again before is known only where an application has its id in offsets, "
            "changelog or checkpoints (docs/operations/lost-topics.md)"
        )


def unrecorded_topics(settings: Settings) -> list[str]:
    """Returns the topics that exist and are recorded with another id, or not at all. Raises Forbidden,
    KafkaException."""
    names = recorded_names()
    there = TopicClient(settings).identities([*names, topics.TOPIC_IDS])
    # A read waits for a topic that the broker does not know.
    recorded = read_topic_ids(settings).all_topics if topics.TOPIC_IDS in there else None
    return list(topic_ids.to_record(recorded, names, there))


def record_topics(settings: Settings, existed: int = 0) -> RecordedTopics:
    """Records the ids of all topics as they are now, if they differ from the record. A topic whose recorded id is given
    up gets an audit record first, and so does a record that begins with topics that existed before.

    Args:
        existed: the number of topics that were not made just now.
    Raises:
        DeliveryFailed, Forbidden, KafkaException.
    """
    names = recorded_names()
    there = TopicClient(settings).known_identities(names)
    before = read_topic_ids(settings).all_topics
    ids = {name: each.topic_id for name, each in there.items()}
    if not topic_ids.to_record(before, names, there):
        return RecordedTopics()
    given_up = tuple(each for each in topic_ids.lost(before or {}, names, there).values() if each.topic in there)
    publisher = Publisher(settings, SOURCE, make_codec(settings))
    for each in given_up:
        loss = PartitionLoss(each.topic, 0, each.kind, each.proof, 0)
        publisher.send(topics.AUDIT, loss_audit(loss, SOURCE, ALL_TOPICS))
    if before is None and existed:
        publisher.send(topics.AUDIT, record_begun(existed))
    publisher.flush()
    # A topic that is gone keeps its recorded id: it is lost until it is created again.
    write_topic_ids(settings, SOURCE, {ALL_TOPICS: {**(before or {}), **ids}})
    return RecordedTopics(given_up, first=before is None)


def record_lost_broker(settings: Settings, description: str) -> None:
    """Writes the audit record of a broker whose topics are all given up. Raises DeliveryFailed, Forbidden."""
    publisher = Publisher(settings, SOURCE, make_codec(settings))
    loss = PartitionLoss(topics.TOPIC_IDS, 0, LossKind.GONE, description, 0)
    publisher.send(topics.AUDIT, loss_audit(loss, SOURCE, ALL_TOPICS))
    publisher.flush()


def forget_topic(settings: Settings, name: str) -> None:
    """Takes a topic out of the record of all topics, because an operator has deleted it."""
    before = read_topic_ids(settings).all_topics
    if before is not None and name in before:
        ids = {topic: topic_id for topic, topic_id in before.items() if topic != name}
        write_topic_ids(settings, SOURCE, {ALL_TOPICS: ids})


def check_recorded(settings: Settings, names: Collection[str]) -> None:
    """Compares topics with the record of all topics, at the start of a process.

    Raises:
        TopicLost: one of them is gone or was created again.
        NoTopicIds: there is no record.
        Forbidden, KafkaException.
    """
    deadline = time.monotonic() + RECORD_PATIENCE_S
    while (recorded := read_topic_ids(settings).all_topics) is None:
        if time.monotonic() > deadline:
            raise NoTopicIds(
                f"{topics.TOPIC_IDS} has no record of the ids of the topics, by which this process would notice one "
                "that was deleted and created again: `tentalis topics apply` writes it"
            )
        time.sleep(RETRY_S)
    there = asked_again(lambda: TopicClient(settings).known_identities(names))
    if found := topic_ids.lost(recorded, names, there):
        raise TopicLost(f"{'; '.join(map(str, found.values()))}. {WAYS_ON}")
