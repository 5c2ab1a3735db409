"""The broker operations of a move: topics and groups, their creation and deletion, and the move's record."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from schemas import topics
from tentalis.kafka.admin import Description, KafkaAdmin, wait_visible
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.groups import describe_groups, group_names
from tentalis.kafka.identity import TopicIdentity
from tentalis.kafka.offsets import committed_offsets
from tentalis.kafka.topic_client import TopicClient
from tentalis.ops.repartition.copying import Writer
from tentalis.ops.repartition.plan import MARKER, TopicMove, UnfinishedMove
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

TIMEOUT_S = 60.0
STOPPED_S = 12.0
"""Longer than the session timeout: a process that was killed stays in its group for that time."""
WHILE_COPYING = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "CreateTime",
}
"""Settings of a topic until its copy is checked: it keeps every record, with the record's own append time."""


class GroupsActive(Exception):
    """Processes still read the topics."""


class MoveBroker:
    """A broker whose topics are moved."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._admin = AdminClient(client_config(settings))
        self._topics = KafkaAdmin(settings)

    @property
    def client(self) -> TopicClient:
        """A new client: one that has seen the old topic of a name keeps its number of partitions for a while."""
        return TopicClient(self.settings)

    def describe(self, names: Iterable[str]) -> list[Description]:
        """Returns the named topics that exist."""
        return self._topics.describe(names)

    def identities(self, names: Collection[str]) -> dict[str, TopicIdentity]:
        """Returns the ids and partition counts of the named topics that exist."""
        return self.client.identities(names)

    def check_stopped(self, names: Collection[str]) -> None:
        """Raises GroupsActive if a member of a consumer group reads one of the topics, or may be given them."""
        deadline = time.monotonic() + STOPPED_S
        while active := self._active(names):
            if time.monotonic() > deadline:
                raise GroupsActive(
                    f"processes of {', '.join(active)} are running: stop the whole stack first, gateways and managers "
                    "too"
                )
            time.sleep(0.5)

    def _active(self, names: Collection[str]) -> list[str]:
        return [
            group.name
            for group in describe_groups(self._admin, group_names(self._admin)).values()
            if group.members
            and (
                group.name.startswith(f"{topics.PREFIX}-")
                or any(topic in names for member in group.members for topic, _ in member.partitions)
            )
        ]

    def committed(self, groups: Mapping[str, Sequence[str]]) -> dict[str, dict[str, dict[int, int]]]:
        """Returns the committed offsets by group, topic and partition."""
        found: dict[str, dict[str, dict[int, int]]] = {}
        for group, names in groups.items():
            for (topic, partition), offset in committed_offsets(self.settings, group, names).items():
                found.setdefault(group, {}).setdefault(topic, {})[partition] = offset
        return found

    def groups(self) -> list[str]:
        """Returns the names of all consumer groups."""
        return group_names(self._admin)

    def create(self, wanted: Mapping[str, TopicMove], partitions: int) -> None:
        """Creates topics (name -> the topic whose settings it gets) for a copy, and waits until they can be written."""
        new = [
            NewTopic(
                name,
                num_partitions=partitions,
                replication_factor=move.replication,
                config={**move.config, **WHILE_COPYING},
            )
            for name, move in wanted.items()
        ]
        for future in self._admin.create_topics(new).values() if new else ():
            future.result(TIMEOUT_S)
        wait_visible(self._topics, dict.fromkeys(wanted, partitions))

    def settle(self, move: TopicMove) -> None:
        """Gives a copied topic the settings of the old one."""
        entries = [
            ConfigEntry(name, move.config[name], incremental_operation=AlterConfigOpType.SET)
            if name in move.config
            else ConfigEntry(name, "", incremental_operation=AlterConfigOpType.DELETE)
            for name in WHILE_COPYING
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, move.name, incremental_configs=entries)
        for future in self._admin.incremental_alter_configs([resource]).values():
            future.result(TIMEOUT_S)

    def delete(self, names: Collection[str]) -> None:
        """Deletes those topics that exist, and waits until they are gone."""
        there = sorted(self.identities(names))
        if not there:
            return
        for future in self._admin.delete_topics(there).values():
            try:
                future.result(TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
        deadline = time.monotonic() + TIMEOUT_S
        while set(there) & set(self._topics.names()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(there)} did not go away within {TIMEOUT_S:g} s: is the broker healthy?")
            time.sleep(0.1)

    # --- the record of an unfinished move ---------------------------------------------------------------------------

    def unfinished(self) -> UnfinishedMove | None:
        """Returns the move whose copies are complete and that has not ended."""
        found = None
        try:
            for stored in read_to_end(self.settings, MARKER):
                found = UnfinishedMove.decode(stored.value or b"")
        except NoSuchTopic:
            return None
        return found

    def begin(self, move: UnfinishedMove) -> None:
        """Records that the copies are complete: from here on, an interrupted move continues from the copies."""
        config = {"retention.ms": "-1", "max.message.bytes": topics.table().common["max.message.bytes"]}
        replication = max(each.replication for each in move.topics)
        self.delete([MARKER])
        for future in self._admin.create_topics([NewTopic(MARKER, 1, replication, config=config)]).values():
            future.result(TIMEOUT_S)
        wait_visible(self._topics, {MARKER: 1})
        self.record(move)

    def record(self, move: UnfinishedMove) -> None:
        """Writes the state of the move."""
        writer = Writer(self.settings, MARKER, 1)
        writer.write(0, None, move.encode(), (), now_ms())
        writer.flush()
