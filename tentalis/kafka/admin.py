"""Compares the broker's topics with `schemas/topics.yaml` and plans, applies and describes them; publishes schemas and
grants ACLs.

A plan never deletes a topic, never shrinks one, and never changes the partition count: that would send a key's records
to another partition than its earlier ones, so it is reported as impossible.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from schemas import keyed_partitions, topics
from schemas.topics import Topic, TopicTable
from schemas.wire.avro import AvroSchema, all_current
from tentalis.kafka.acls import Grant, Operation, Role
from tentalis.kafka.topology import topic_table
from tentalis.service.settings import Settings

MAX_REPLICATION = 3
# Settings whose values Kafka treats as sets and may return in another order.
SET_VALUED = frozenset({"cleanup.policy"})


class ChangeKind(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    IMPOSSIBLE = "impossible"


class Impossible(Exception):
    """A topic differs from the table in a way that cannot be changed while it holds records."""


class NoAuthorizer(Exception):
    """The broker has no authorizer and keeps no ACLs."""


class NotVisible(Exception):
    """Created topics did not appear in the broker's metadata in time."""


@dataclass(frozen=True, slots=True)
class Current:
    """The state of a topic on the broker."""

    partitions: int
    replication: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One step from the current to the wanted state. `config` maps a setting to (current value or None, wanted)."""

    kind: ChangeKind
    topic: str
    partitions: int
    config: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        match self.kind:
            case ChangeKind.CREATE:
                settings = ", ".join(f"{name}={new}" for name, (_, new) in self.config.items())
                return f"{self.partitions} partitions, {settings}"
            case ChangeKind.UPDATE:
                return ", ".join(f"{name}: {old} -> {new}" for name, (old, new) in self.config.items())
            case ChangeKind.IMPOSSIBLE:
                return self.reason


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition of a topic; `end` - `start` is an upper bound on the number of its records."""

    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Description:
    """A topic as `topics describe` shows it. `config` holds only what was set for this topic."""

    name: str
    managed: bool
    records: tuple[str, ...]
    partitions: tuple[PartitionState, ...]
    config: Mapping[str, str]


class AdminPort(Protocol):
    """The broker operations that planning and applying need."""

    def brokers(self) -> int:
        """The number of brokers."""
        ...

    def current(self, names: Iterable[str]) -> dict[str, Current]:
        """The named topics that exist."""
        ...

    def create(self, changes: Sequence[Change], replication: int, dry_run: bool) -> None:
        """Creates topics; an existing topic is not an error."""
        ...

    def update(self, changes: Sequence[Change], dry_run: bool) -> None:
        """Sets the settings that the changes name and leaves all others as they are."""
        ...

    def visible(self, wanted: Mapping[str, int]) -> bool:
        """True if every topic has all its partitions, and each answers."""
        ...


def _same(name: str, left: str | None, right: str) -> bool:
    if left is None or name not in SET_VALUED:
        return left == right
    return {part.strip() for part in left.split(",")} == {part.strip() for part in right.split(",")}


def _change(wanted: Topic, current: Current | None) -> Change | None:
    if current is None:
        return Change(
            ChangeKind.CREATE, wanted.name, wanted.partitions, {k: (None, v) for k, v in wanted.config.items()}
        )
    if current.partitions != wanted.partitions:
        reason = (
            f"has {current.partitions} partitions where {wanted.partitions} are wanted; changing the count moves keys "
            f"to other partitions. Set {keyed_partitions.VARIABLE}={current.partitions} if all keyed topics have so "
            "many; else move them with `tentalis topics repartition`"
        )
        return Change(ChangeKind.IMPOSSIBLE, wanted.name, wanted.partitions, reason=reason)
    differing = {
        name: (current.config.get(name), value)
        for name, value in wanted.config.items()
        if not _same(name, current.config.get(name), value)
    }
    return Change(ChangeKind.UPDATE, wanted.name, wanted.partitions, differing) if differing else None


def plan(table: TopicTable, current: Mapping[str, Current]) -> list[Change]:
    """The changes that the broker needs, in name order. Topics that are not in the table are left alone."""
    changes = (_change(wanted, current.get(name)) for name, wanted in sorted(table.topics.items()))
    return [change for change in changes if change is not None]


def replication_factor(brokers: int, wanted: int | None) -> int:
    """The wanted replication factor, or the default: three, or one per broker where there are fewer."""
    return wanted if wanted is not None else min(MAX_REPLICATION, max(1, brokers))


def min_in_sync(replication: int) -> int:
    """The replicas that must confirm a record: two of three; of fewer, one, so that one broker may be down."""
    return 2 if replication >= 3 else 1


def apply(
    port: AdminPort, changes: Sequence[Change], *, dry_run: bool, replication: int | None = None, timeout: float = 30.0
) -> None:
    """Carries out a plan and waits until the created topics are visible. With `dry_run` the broker only validates it.

    Raises Impossible before any change, if the plan contains an impossible one; NotVisible; KafkaException.
    """
    refused = [f"{change.topic} {change.reason}" for change in changes if change.kind is ChangeKind.IMPOSSIBLE]
    if refused:
        raise Impossible("nothing was changed: " + "; ".join(refused))
    creates = [change for change in changes if change.kind is ChangeKind.CREATE]
    updates = [change for change in changes if change.kind is ChangeKind.UPDATE]
    if creates:
        port.create(creates, replication_factor(port.brokers(), replication), dry_run)
    if updates:
        port.update(updates, dry_run)
    if dry_run or not creates:
        return
    wait_visible(port, {change.topic: change.partitions for change in creates}, timeout)


def wait_visible(port: AdminPort, wanted: Mapping[str, int], timeout: float = 30.0) -> None:
    """Waits until topics (name -> partitions) can be read and written, after their creation or after a broker's start.

    Raises NotVisible.
    """
    deadline = time.monotonic() + timeout
    while not port.visible(wanted):
        if time.monotonic() > deadline:
            raise NotVisible(f"{', '.join(wanted)} did not become visible within {timeout:g} s: is the broker healthy?")
        time.sleep(0.05)


class KafkaAdmin:
    """The AdminPort of a real broker."""

    def __init__(self, settings: Settings, timeout: float = 30.0) -> None:
        from confluent_kafka.admin import AdminClient

        from tentalis.kafka.config import client_config

        # librdkafka's own log of lost connections is dropped: the calls raise the same errors.
        quiet = logging.Logger("tentalis.kafka.admin.client")
        quiet.addHandler(logging.NullHandler())
        self._client = AdminClient(client_config(settings), logger=quiet)
        self._settings, self._timeout = settings, timeout

    def _result(self, future: Any, operation: Operation, topic: str) -> Any:
        """Waits for the result of a request. Raises Forbidden, KafkaException."""
        from confluent_kafka import KafkaException

        from tentalis.kafka.errors import DENIED, refused

        try:
            return future.result(self._timeout)
        except KafkaException as error:
            if error.args[0].code() in DENIED:
                raise refused(self._settings, error.args[0], operation, topic) from error
            raise

    def brokers(self) -> int:
        return len(self._client.list_topics(timeout=self._timeout).brokers)

    def _metadata(self) -> dict[str, Any]:
        found = self._client.list_topics(timeout=self._timeout).topics
        return {name: topic for name, topic in found.items() if topic.error is None}

    def names(self) -> list[str]:
        """All topics of the broker, in name order."""
        return sorted(self._metadata())

    def partitions(self) -> dict[str, int]:
        """The number of partitions of each topic of the broker."""
        return {name: len(topic.partitions) for name, topic in self._metadata().items()}

    def active_groups(self) -> list[str]:
        """The consumer groups that have members, in name order. Raises Forbidden, KafkaException."""
        from confluent_kafka import ConsumerGroupState

        states = {
            ConsumerGroupState.STABLE,
            ConsumerGroupState.PREPARING_REBALANCING,
            ConsumerGroupState.COMPLETING_REBALANCING,
        }
        found = self._result(self._client.list_consumer_groups(states=states), Operation.DESCRIBE, topics.PREFIX)
        return sorted(group.group_id for group in found.valid)

    def topic_id(self, name: str) -> str:
        """Kafka's own id of a topic: it changes when the topic is deleted and created again, and differs between
        clusters. Raises Forbidden, KafkaException."""
        from confluent_kafka import TopicCollection

        future = self._client.describe_topics(TopicCollection([name]))[name]
        return str(self._result(future, Operation.DESCRIBE, name).topic_id)

    def _configs(self, names: Sequence[str], *, only_set: bool = False) -> dict[str, dict[str, str]]:
        from confluent_kafka.admin import ConfigResource, ConfigSource

        if not names:
            return {}
        futures = self._client.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, name) for name in names])
        return {
            resource.name: {
                key: entry.value or ""
                for key, entry in self._result(future, Operation.DESCRIBE_CONFIGS, resource.name).items()
                if not only_set or entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
            }
            for resource, future in futures.items()
        }

    def current(self, names: Iterable[str]) -> dict[str, Current]:
        metadata = self._metadata()
        there = [name for name in names if name in metadata]
        configs = self._configs(there)
        return {
            name: Current(
                len(metadata[name].partitions),
                min(len(partition.replicas) for partition in metadata[name].partitions.values()),
                configs[name],
            )
            for name in there
        }

    def create(self, changes: Sequence[Change], replication: int, dry_run: bool) -> None:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        in_sync = {"min.insync.replicas": str(min_in_sync(replication))}
        wanted = [
            NewTopic(
                change.topic,
                num_partitions=change.partitions,
                replication_factor=replication,
                config={name: new for name, (_, new) in change.config.items()} | in_sync,
            )
            for change in changes
        ]
        for name, future in self._client.create_topics(wanted, validate_only=dry_run).items():
            try:
                self._result(future, Operation.CREATE, name)
            except KafkaException as error:
                # Another process applied the table at the same time, or an earlier attempt of this request succeeded.
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def update(self, changes: Sequence[Change], dry_run: bool) -> None:
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        resources = [
            ConfigResource(
                ConfigResource.Type.TOPIC,
                change.topic,
                incremental_configs=[
                    ConfigEntry(name, new, incremental_operation=AlterConfigOpType.SET)
                    for name, (_, new) in change.config.items()
                ],
            )
            for change in changes
        ]
        for resource, future in self._client.incremental_alter_configs(resources, validate_only=dry_run).items():
            self._result(future, Operation.ALTER_CONFIGS, resource.name)

    def visible(self, wanted: Mapping[str, int]) -> bool:
        from confluent_kafka import KafkaError, KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        from tentalis.kafka.errors import ELECTING
        from tentalis.kafka.topic_client import known_offset

        metadata = self._metadata()
        if any(name not in metadata or len(metadata[name].partitions) != count for name, count in wanted.items()):
            return False
        # Metadata is ahead: for a moment the leader that it names does not yet know that it is the leader.
        places = {TopicPartition(name, p): OffsetSpec.latest() for name, count in wanted.items() for p in range(count)}
        try:
            for place, future in self._client.list_offsets(places).items():
                known_offset(self._result(future, Operation.DESCRIBE, place.topic).offset)
        except KafkaException as error:
            if error.args[0].code() in ELECTING | {KafkaError._TRANSPORT}:
                return False
            raise
        return True

    def describe(self, names: Iterable[str]) -> list[Description]:
        """The named topics that exist, with their offsets and the settings that were set for them."""
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec

        from tentalis.kafka.topic_client import known_offset

        metadata = self._metadata()
        there = [name for name in names if name in metadata]
        places = [TopicPartition(name, p) for name in there for p in metadata[name].partitions]
        offsets: dict[tuple[str, int], list[int]] = {(place.topic, place.partition): [] for place in places}
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest()) if places else ():
            for place, future in self._client.list_offsets({place: spec for place in places}).items():
                offsets[place.topic, place.partition].append(known_offset(future.result(self._timeout).offset))
        configs = self._configs(there, only_set=True)
        table = topic_table().topics
        return [
            Description(
                name,
                name in table,
                table[name].records if name in table else (),
                tuple(
                    PartitionState(p, info.leader, tuple(info.replicas), tuple(info.isrs), *offsets[name, p])
                    for p, info in sorted(metadata[name].partitions.items())
                ),
                configs[name],
            )
            for name in there
        ]


def missing_schemas(settings: Settings) -> list[AvroSchema]:
    """The current schemas that are not yet on tentalis.schemas.v1; all of them if the broker does not know the topic.
    Raises Forbidden, KafkaException, TimeoutError."""
    from tentalis.kafka.consumer import read_to_end
    from tentalis.kafka.topic_client import TopicClient

    # Asked first, because a read waits for a topic that the broker does not know.
    if topics.SCHEMAS not in TopicClient(settings).identities([topics.SCHEMAS]):
        return list(all_current())
    published = {stored.key for stored in read_to_end(settings, topics.SCHEMAS) if stored.value is not None}
    return [schema for schema in all_current() if schema.fingerprint.hex() not in published]


def publish_schemas(settings: Settings, schemas: Sequence[AvroSchema]) -> None:
    """Writes schemas to tentalis.schemas.v1 (key: fingerprint in hex, value: the JSON text). Idempotent.

    With SCHEMA_REGISTRY_URL every current schema is registered there too.
    Raises DeliveryFailed, SchemaRefused, SchemasUnavailable.
    """
    from tentalis.kafka.codec import make_codec
    from tentalis.kafka.producer import Publisher

    if schemas:
        publisher = Publisher(settings, "tentalis-admin", make_codec(settings))
        for schema in schemas:
            publisher.send_bytes(topics.SCHEMAS, schema.fingerprint.hex().encode(), schema.text.encode())
        publisher.flush()
    if settings.schema_registry:
        from schemas.wire.registry import ConfluentRegistry

        login = settings.registry_login.client_config()
        ConfluentRegistry(settings.schema_registry, login=login).register_all()


def ensure(settings: Settings, *, replication: int | None = None) -> list[Change]:
    """Brings the broker in line with the table, schemas and the record of topic ids included; returns the changes.

    Raises as `apply`, `publish_schemas` and `record_topics` do.
    """
    from tentalis.kafka.topic_id_log import record_topics

    port = KafkaAdmin(settings)
    table = topic_table()
    changes = plan(table, port.current(table.topics))
    apply(port, changes, dry_run=False, replication=replication)
    publish_schemas(settings, missing_schemas(settings))
    record_topics(settings)
    return changes


def bindings(roles: Iterable[Role], principal: str | None) -> list[tuple[Role, str, Grant]]:
    """Pairs each grant with its role and principal; by default each role has its own user."""
    return [(role, principal or role.principal, each) for role in roles for each in role.grants]


def grant(settings: Settings, wanted: Iterable[tuple[Role, str, Grant]]) -> int:
    """Creates the ACLs of `bindings` and returns their number. Idempotent.

    Raises Forbidden if the user lacks Alter on the cluster, KafkaException, NoAuthorizer.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    from tentalis.kafka.config import client_config
    from tentalis.kafka.errors import Forbidden

    client = AdminClient(client_config(settings))
    acls = {
        AclBinding(
            ResourceType[each.resource.name],
            each.name,
            ResourcePatternType.PREFIXED if each.prefixed else ResourcePatternType.LITERAL,
            whose,
            "*",
            AclOperation[each.operation.name],
            AclPermissionType.ALLOW,
        )
        for _, whose, each in wanted
    }
    for future in client.create_acls(list(acls)).values():
        try:
            future.result(30)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.SECURITY_DISABLED:
                raise NoAuthorizer(
                    f"Kafka on {settings.bootstrap} has no authorizer: it allows every operation and keeps no ACLs. "
                    "Set authorizer.class.name on the brokers first"
                ) from error
            if code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                raise Forbidden(
                    f"the broker's ACLs do not allow {settings.security.principal} to change ACLs: that requires Alter "
                    "on the cluster, or a super user"
                ) from error
            raise
    return len(acls)
