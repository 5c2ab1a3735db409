"""Removing records of a topic, by trimming or deleting it: what it would take away, and from whom. `lost` is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas import topics
from tentalis.kafka import topology
from tentalis.kafka.errors import NoSuchTopic

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from tentalis.kafka.admin import Description
    from tentalis.service.settings import Settings

# What a replay of a run reads.
_REPLAYED = (topics.RUNS, topics.BATCHES, topics.ROLLOUTS, topics.POLICIES, topics.SCHEMAS)
_TIMEOUT_S = 30.0


class CannotTrim(Exception):
    """The topic keeps the newest record of each key, so its beginning cannot be cut off."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The records to remove from a topic.

    Attributes:
        topic: its name.
        before: per partition, the offset below which records are removed.
        records: their number (an upper bound on compacted topics).
        consequences: what is lost with them, one sentence each.
    """

    topic: str
    before: Mapping[int, int]
    records: int
    consequences: tuple[str, ...]


def plan_removal(settings: Settings, topic: str, before_ms: int | None) -> Removal:
    """Plans to remove the records written before a time (ms since the epoch), or the whole topic if it is None.

    Raises NoSuchTopic, CannotTrim.
    """
    from confluent_kafka.admin import AdminClient

    from tentalis.kafka.admin import KafkaAdmin
    from tentalis.kafka.config import client_config

    found = KafkaAdmin(settings).describe([topic])
    if not found:
        raise NoSuchTopic(f"the broker has no topic {topic}; `tentalis topics list` lists its topics")
    client = AdminClient(client_config(settings))
    before = {partition.partition: partition.end for partition in found[0].partitions}
    if before_ms is not None:
        if "compact" in found[0].config.get("cleanup.policy", "delete"):
            raise CannotTrim(
                f"{topic} keeps the newest record of each key, so cutting off its beginning would remove current "
                "values. `tentalis topics delete` removes all of it"
            )
        before |= _first_offsets(client, topic, list(before), before_ms)
    records = sum(max(0, before[each.partition] - each.start) for each in found[0].partitions)
    return Removal(
        topic,
        before,
        records,
        tuple(lost(found[0], records, _unread(settings, client, found[0], before), whole=before_ms is None)),
    )


def remove(settings: Settings, removal: Removal, *, whole: bool) -> None:
    """Deletes the topic, or the records of the plan. Raises KafkaException."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    from tentalis.kafka.config import client_config

    client = AdminClient(client_config(settings))
    if whole:
        client.delete_topics([removal.topic])[removal.topic].result(_TIMEOUT_S)
        return
    places = [TopicPartition(removal.topic, partition, offset) for partition, offset in removal.before.items()]
    for future in client.delete_records(places).values():
        future.result(_TIMEOUT_S)


def lost(topic: Description, records: int, unread: Mapping[str, int], *, whole: bool) -> Sequence[str]:
    """Returns what is lost with records of a topic, one sentence each.

    `unread`: per consumer group, the number of these records that it has not processed.
    """
    said = []
    for application in topology.APPLICATIONS:
        if topic.name in application.changelogs:
            said.append(f"the state of {application.name}: what is open or remembered there is forgotten")
        elif topic.name in (*application.consumes, *application.reads):
            said.append(f"{application.name} reads it")
    said += [
        f"{count} records that {group} has not processed yet"
        + ("" if whole else ": a stream application ends with 7 until it is started once with --accept-loss")
        for group, count in unread.items()
        if count
    ]
    if topic.name in _REPLAYED and records:
        said.append("runs that used these records can no longer be replayed; `tentalis export RUN` keeps one first")
    if topic.name.endswith(topics.dlq("")) and records:
        said.append("dead letters that were not replayed yet can no longer be")
    if topic.name == topics.TOPIC_IDS:
        said.append("a topic that was deleted and created again while no process ran is then noticed less often")
    if whole and topic.managed:
        said.append("`tentalis topics apply --accept-loss` creates it again, empty and with offsets from 0")
        if topic.name == topics.TOPIC_IDS:
            said.append("processes end with 3 until then, and keep no record of what was lost before")
        elif topic.name in topics.CONTROL:
            said.append("a trainer whose run is on it ends with 7 until the records are back (`tentalis import`)")
        else:
            said.append("applications that have read it then end with 7 until they are started once with --accept-loss")
    return said


def _first_offsets(client: AdminClient, topic: str, partitions: list[int], before_ms: int) -> dict[int, int]:
    """Returns, per partition that has one, the offset of the first record at or after the time."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec

    from tentalis.kafka.topic_client import offset_of_time

    asked = {TopicPartition(topic, partition): OffsetSpec.for_timestamp(before_ms) for partition in partitions}
    found = {
        int(place.partition): offset_of_time(future.result(_TIMEOUT_S).offset)
        for place, future in client.list_offsets(asked).items()
    }
    return {partition: offset for partition, offset in found.items() if offset is not None}


def _unread(settings: Settings, client: AdminClient, topic: Description, before: Mapping[int, int]) -> dict[str, int]:
    """Returns, per consumer group of our applications, the number of records to remove that it has not processed."""
    from tentalis.kafka.offsets import committed_offsets

    readers = [each for each in topology.APPLICATIONS if topic.name in each.consumes]
    groups = client.list_consumer_groups().result(_TIMEOUT_S).valid
    start = {each.partition: each.start for each in topic.partitions}
    found = {}
    for group in sorted(str(each.group_id) for each in groups):
        if any(reader.group is not None and reader.has_group(group) for reader in readers):
            committed = committed_offsets(settings, group, [topic.name])
            found[group] = sum(
                max(0, before[partition] - max(start[partition], offset))
                for (_, partition), offset in committed.items()
            )
    return found
