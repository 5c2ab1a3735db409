"""Lag of consumer groups, plans to reset their offsets, and reasons against deleting them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tentalis.kafka import topology
from tentalis.kafka.groups import ConsumerGroup
from tentalis.kafka.positions import Start, begin_offset
from tentalis.kafka.topology import Application, GroupBy

ABSENT = "absent"
"""State of an application's group that the broker does not know: the application never ran, or long ago."""
DEAD = "dead"
"""The broker's word for a group that it does not have any more."""


class ResetRefused(Exception):
    """A reset that is not carried out. The message gives the reason and the remedy."""


class GroupDeletionRefused(Exception):
    """A group that is not deleted. The message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The position of a group on a partition. `committed` None: it has committed nothing there and would begin at
    `start`. `oldest_ms`: timestamp of the oldest unread record; None if there is no unread record."""

    topic: str
    partition: int
    committed: int | None
    start: int
    end: int
    oldest_ms: int | None = None

    @property
    def position(self) -> int:
        """The offset from which the group continues: records before `start` are gone."""
        return self.start if self.committed is None else max(self.committed, self.start)

    @property
    def records(self) -> int:
        """The number of unread offsets."""
        return max(0, self.end - self.position)


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A consumer group with its positions. `application` is empty for a group that is not in the topology."""

    group: ConsumerGroup
    application: str
    partitions: tuple[PartitionLag, ...]

    @property
    def active(self) -> bool:
        """True if the group has members."""
        return bool(self.group.members)

    @property
    def started(self) -> bool:
        """True if the group has committed an offset."""
        return any(each.committed is not None for each in self.partitions)

    @property
    def records(self) -> int | None:
        """Unread records; None if the group has never committed an offset."""
        return sum(each.records for each in self.partitions) if self.started else None

    def seconds(self, now_ms: int) -> float | None:
        """Age of the oldest unread record by its timestamp; 0 if everything is read. None, which is unknown: nothing
        was ever committed, or an unread record has no timestamp."""
        if not self.started:
            return None
        oldest = [each.oldest_ms for each in self.partitions if each.records]
        known = [each for each in oldest if each is not None]
        if len(known) < len(oldest):
            return None
        return max(0, now_ms - min(known)) / 1000 if known else 0.0


def owner(group: str) -> Application | None:
    """Returns the application that a consumer group belongs to; None for a group that is not of Tentalis."""
    return next((each for each in topology.APPLICATIONS if each.group is not None and each.has_group(group)), None)


def is_of_one_worker(group: str, names: Collection[str]) -> bool:
    """True for the group in which one worker with a default id (host name and environment) reads the tasks that name
    it: `tentalis-worker-ENVIRONMENT-HOST-ENVIRONMENT`.

    `names`: the groups of the broker. A worker is also in the group of its environment. The end of the name tells its
    own group from that of an environment `a-b` beside an environment `a`.
    """
    application = owner(group)
    if application is None or application.group_by is not GroupBy.ENVIRONMENT:
        return False
    environments = (name.removeprefix(f"{application.group}-") for name in names if owner(name) is application)
    return any(
        group.startswith(f"{application.group}-{each}-")
        and group.endswith(f"-{each}")
        and len(group) > len(f"{application.group}-{each}-{each}")
        for each in environments
    )


def expected_groups() -> list[str]:
    """Returns the groups that every deployment has: those without a part for an environment or a policy."""
    return [each.consumer_group() for each in topology.APPLICATIONS if each.group is not None and each.group_by is None]


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """The position to reset to: a `start`, or `shift` records from the committed offset. Exactly one is set."""

    start: Start | None = None
    shift: int | None = None

    def offset(self, lag: PartitionLag, at_time: int | None) -> int:
        """Returns the offset on a partition. `at_time`: the broker's offset for the time of `start`."""
        if self.start is not None:
            return begin_offset(self.start, lag.start, lag.end, at_time)
        return min(max(lag.position + (self.shift or 0), lag.start), lag.end)


@dataclass(frozen=True, slots=True)
class ResetRow:
    """The reset of one partition. `records`: how many records the group reads again (positive) or skips (negative)."""

    topic: str
    partition: int
    committed: int | None
    target: int
    start: int
    end: int

    @property
    def records(self) -> int:
        position = self.start if self.committed is None else max(self.committed, self.start)
        return position - self.target

    @property
    def changes(self) -> bool:
        """True if the commit of the target changes where the group continues."""
        return self.committed != self.target


def plan_reset(
    target: ResetTarget, partitions: Iterable[PartitionLag], at_time: Mapping[tuple[str, int], int | None]
) -> list[ResetRow]:
    """Returns the new offset of each partition. `at_time`: the broker's offsets for the time of the target."""
    return [
        ResetRow(
            lag.topic,
            lag.partition,
            lag.committed,
            target.offset(lag, at_time.get((lag.topic, lag.partition))),
            lag.start,
            lag.end,
        )
        for lag in partitions
    ]


def reason_against(application: Application, rows: Sequence[ResetRow], changelog_records: Mapping[str, int]) -> str:
    """Returns the reason why a reset would leave the application inconsistent; "" if there is none.

    Args:
        changelog_records: the number of records on each of the application's changelogs.
    """
    changed = [row for row in rows if row.changes]
    if not changed:
        return ""
    if application.name == topology.named("trainer").name:
        return (
            "the trainer begins at the low water of its newest plan, not at the committed offsets: they are for "
            "monitoring only, and a reset would make the lag wrong"
        )
    held = [name for name, count in sorted(changelog_records.items()) if count]
    if not held:
        return ""
    again, skipped = (sum(max(0, sign * row.records) for row in changed) for sign in (1, -1))
    effects = []
    if again:
        effects.append(f"the {again} records that it reads again are recognised by their offsets and skipped")
    if skipped:
        effects.append(f"the {skipped} records that it skips are missing from the state for good")
    return (
        f"its state on {', '.join(held)} contains the records up to the committed offsets: "
        f"{'; '.join(effects) or 'the commit changes nothing'}. To process the topics again, delete "
        f"{', '.join(held)}, create it again with `tentalis topics apply --accept-loss`, reset with --to-earliest, and "
        "start the application once with --accept-loss"
    )


def reason_to_keep(application: Application) -> str:
    """Returns the reason against deleting an inactive group; "" for the groups of workers, which have no state."""
    if application.group_by is GroupBy.ENVIRONMENT:
        return ""
    return (
        f"it holds the committed offsets of {application.name}, which are lost with it. To move them: "
        "`tentalis groups reset-offsets`"
    )


def check_deletion(lag: GroupLag, reason: str, force: Collection[str]) -> None:
    """Raises GroupDeletionRefused if the group has members or is not on the broker, or if there is a `reason` against
    it and `force` does not name the group."""
    name = lag.group.name
    if lag.active:
        raise GroupDeletionRefused(f"the group {name} is active. Stop its members first: {_members(lag)}")
    if lag.group.state in (ABSENT, DEAD):
        raise GroupDeletionRefused(f"the broker has no group {name}: there is nothing to delete")
    if reason and name not in force:
        raise GroupDeletionRefused(
            f"the group {name} is not deleted: {reason}. To delete it nevertheless: --force {name}"
        )


def _members(lag: GroupLag) -> str:
    return ", ".join(sorted(f"{member.client_id} on {member.host}" for member in lag.group.members))


def check_reset(lag: GroupLag, reason: str, force: str | None) -> None:
    """Raises ResetRefused if the group has members, or if there is a `reason` against it and `force` does not name the
    group."""
    name = lag.group.name
    if lag.active:
        raise ResetRefused(
            f"the group {name} is active: it would overwrite the offsets. Stop its members first: {_members(lag)}"
        )
    if force is not None and force != name:
        raise ResetRefused(f"--force names {force}, not {name}: name the group that is reset")
    if reason and force is None:
        raise ResetRefused(f"the group {name} is not reset: {reason}. To reset it nevertheless: --force {name}")
