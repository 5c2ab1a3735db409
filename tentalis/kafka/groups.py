"""The consumer groups of a broker: their states and their members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a consumer group, with the topic-partitions that are assigned to it."""

    client_id: str
    host: str
    instance: str | None
    partitions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group. `state` is the broker's word for it in lower case: stable, empty, dead and others."""

    name: str
    state: str
    members: tuple[GroupMember, ...]


def group_names(client: AdminClient) -> list[str]:
    """Returns the names of all consumer groups that this principal may see, in order. Raises KafkaException."""
    listed = client.list_consumer_groups(request_timeout=TIMEOUT_S).result(2 * TIMEOUT_S)
    if listed.errors:
        # Wrapped: callers catch KafkaException, and a bare KafkaError is none.
        raise KafkaException(listed.errors[0])
    return sorted(group.group_id for group in listed.valid)


def describe_groups(client: AdminClient, names: Iterable[str]) -> dict[str, ConsumerGroup]:
    """Returns these groups by name. A group that does not exist has the state `dead`. Raises KafkaException."""
    wanted = list(names)
    if not wanted:
        return {}
    described = client.describe_consumer_groups(wanted, request_timeout=TIMEOUT_S)
    found = {}
    for name, future in described.items():
        try:
            group = future.result(2 * TIMEOUT_S)
        except KafkaException as error:
            # Brokers since 4.0 answer so; older ones with the state.
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise
            found[name] = ConsumerGroup(name, "dead", ())
            continue
        members = tuple(
            GroupMember(
                member.client_id,
                member.host,
                member.group_instance_id,
                tuple((place.topic, place.partition) for place in member.assignment.topic_partitions),
            )
            for member in group.members
        )
        found[name] = ConsumerGroup(name, group.state.name.lower(), members)
    return found
