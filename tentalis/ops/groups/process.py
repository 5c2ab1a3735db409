"""Reads the consumer groups of a broker; commits new offsets for inactive ones, and deletes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from tentalis.kafka.acls import Operation, Resource
from tentalis.kafka.config import client_config
from tentalis.kafka.errors import NoSuchTopic, forbidden
from tentalis.kafka.groups import ConsumerGroup, describe_groups, group_names
from tentalis.kafka.offsets import (
    commit_offsets,
    committed_offsets,
    offset_ranges,
    offsets_at,
    oldest_records,
    without_markers,
)
from tentalis.ops.groups.core import (
    ABSENT,
    GroupDeletionRefused,
    GroupLag,
    PartitionLag,
    ResetRow,
    ResetTarget,
    check_deletion,
    check_reset,
    expected_groups,
    is_of_one_worker,
    owner,
    plan_reset,
    reason_against,
    reason_to_keep,
)
from tentalis.service.settings import Settings

_TIMEOUT_S = 30.0


class UnknownGroup(Exception):
    """No application has a consumer group of this name."""


def read_groups(settings: Settings, names: Collection[str] = (), *, ages: bool = False) -> list[GroupLag]:
    """Returns the named groups, or all groups of the broker and those that every deployment has, by name.

    `ages`: with the timestamps of the oldest unread records. Raises UnknownGroup, KafkaException.
    """
    names = dict.fromkeys(names)
    client = AdminClient(client_config(settings))
    known = group_names(client)
    unknown = [name for name in names if name not in known and owner(name) is None]
    if unknown:
        raise UnknownGroup(
            f"the broker has no consumer group {', '.join(unknown)}, and no application has one of this name; "
            f"groups: {', '.join(known) or 'none'}"
        )
    wanted = sorted(names or {*known, *expected_groups()})
    described = describe_groups(client, [name for name in wanted if name in known])
    ranges: dict[str, dict[int, tuple[int, int]]] = {}
    return [_lag(settings, described.get(name, ConsumerGroup(name, ABSENT, ())), ranges, ages=ages) for name in wanted]


def _lag(
    settings: Settings, group: ConsumerGroup, ranges: dict[str, dict[int, tuple[int, int]]], *, ages: bool
) -> GroupLag:
    application = owner(group.name)
    if application is None:
        return GroupLag(group, "", ())
    for topic in application.consumes:
        if topic not in ranges:
            ranges[topic] = offset_ranges(settings, topic)
    # Looking up the offsets of a group that does not exist would create no group, but cost a coordinator lookup.
    committed = {} if group.state == ABSENT else committed_offsets(settings, group.name, application.consumes)
    partitions = [
        PartitionLag(topic, p, committed.get((topic, p)), *ranges[topic][p])
        for topic in application.consumes
        for p in sorted(ranges[topic])
    ]
    if committed:
        behind = {(each.topic, each.partition): each.position for each in partitions if each.records}
        unread = oldest_records(settings, behind) if ages else without_markers(settings, behind)
        partitions = [
            PartitionLag(
                each.topic,
                each.partition,
                each.committed,
                each.start,
                # Behind the last record there may be offsets without one, such as the marker of a transaction.
                each.end if (each.topic, each.partition) in unread or not each.records else each.position,
                _known(unread.get((each.topic, each.partition))) if ages else None,
            )
            for each in partitions
        ]
    return GroupLag(group, application.name, tuple(partitions))


def _known(timestamp_ms: int | None) -> int | None:
    """Returns a timestamp; None for -1, which is that of a record without one."""
    return None if timestamp_ms is None or timestamp_ms < 0 else timestamp_ms


def planned_reset(
    settings: Settings, name: str, target: ResetTarget, only: Collection[str], force: str | None
) -> tuple[list[ResetRow], str]:
    """Returns the plan of a reset, and the reason against it that `force` overrides ("" if there is none).

    `only`: the topics to reset, by default all that the group reads. Raises ResetRefused, UnknownGroup, NoSuchTopic.
    """
    (lag,) = read_groups(settings, [name])
    application = owner(name)
    if application is None:
        raise _foreign(name)
    wrong = sorted(set(only) - {*application.consumes})
    if wrong:
        raise NoSuchTopic(f"{name} does not read {', '.join(wrong)}; it reads {', '.join(application.consumes)}")
    topics = [topic for topic in application.consumes if not only or topic in only]
    at_time: dict[tuple[str, int], int | None] = {}
    if target.start is not None and target.start.at_ms is not None:
        for topic in topics:
            at_time |= {(topic, p): offset for p, offset in offsets_at(settings, topic, target.start.at_ms).items()}
    rows = plan_reset(target, [each for each in lag.partitions if each.topic in topics], at_time)
    reason = reason_against(application, rows, _changelog_records(settings, application.changelogs))
    check_reset(lag, reason, force)
    return rows, reason


def _foreign(name: str) -> UnknownGroup:
    return UnknownGroup(
        f"{name} is not a group of an application of Tentalis; `tentalis groups list` lists them. For others, use the "
        "tools of Kafka or of their program"
    )


def replaced_workers(settings: Settings) -> list[GroupLag]:
    """Returns the groups of single workers that have no members: of containers or pods that others replaced.

    Raises KafkaException.
    """
    found = read_groups(settings)
    names = [lag.group.name for lag in found]
    return [lag for lag in found if not lag.active and is_of_one_worker(lag.group.name, names)]


def planned_deletion(settings: Settings, names: Sequence[str], force: Collection[str]) -> list[GroupLag]:
    """Returns the groups of these names, all of which may be deleted. Raises GroupDeletionRefused, UnknownGroup."""
    found = read_groups(settings, names)
    for lag in found:
        application = owner(lag.group.name)
        if application is None:
            raise _foreign(lag.group.name)
        check_deletion(lag, reason_to_keep(application), force)
    return found


def delete_groups(settings: Settings, names: Sequence[str]) -> None:
    """Deletes inactive groups with their offsets. The broker refuses a group that has members again.

    Raises KafkaException, Forbidden, GroupDeletionRefused.
    """
    client = AdminClient(client_config(settings))  # it must live until its requests are answered
    again = []
    for name, future in client.delete_consumer_groups(list(names)).items():
        try:
            future.result(_TIMEOUT_S)
        except KafkaException as error:
            match error.args[0].code():
                case KafkaError.GROUP_ID_NOT_FOUND:  # its offsets expired, or somebody else deleted it
                    continue
                case KafkaError.NON_EMPTY_GROUP:
                    again.append(name)
                    continue
                case KafkaError.GROUP_AUTHORIZATION_FAILED:
                    raise forbidden(settings, [(Operation.DELETE, Resource.GROUP, name)]) from error
            raise
    if again:
        raise GroupDeletionRefused(
            f"{', '.join(again)}: members came back, so {len(again)} of {len(names)} groups are not deleted; the "
            "others are"
        )


def _changelog_records(settings: Settings, changelogs: Sequence[str]) -> dict[str, int]:
    found = {}
    for name in changelogs:
        try:
            found[name] = sum(end - start for start, end in offset_ranges(settings, name).values())
        except NoSuchTopic:  # deleted, or never created: the application has no state
            found[name] = 0
    return found


def reset(settings: Settings, name: str, rows: Sequence[ResetRow]) -> int:
    """Commits the offsets of a plan; returns how many partitions changed. Raises KafkaException, Forbidden."""
    changed = {(row.topic, row.partition): row.target for row in rows if row.changes}
    if changed:
        commit_offsets(settings, name, changed)
    return len(changed)
