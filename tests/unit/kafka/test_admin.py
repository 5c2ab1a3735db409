"""Planning and applying the topic table, without a broker."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from schemas.topics import Topic, TopicTable
from tentalis.kafka import admin
from tentalis.kafka.admin import Change, ChangeKind, Current, Impossible, NotVisible, plan
from tentalis.kafka.topology import topic_table


@dataclass
class FakeBroker:
    """An AdminPort on a dictionary; created topics become visible after `delay` looks."""

    topics: dict[str, Current] = field(default_factory=dict)
    count: int = 1
    delay: int = 0
    calls: list[str] = field(default_factory=list)

    def brokers(self) -> int:
        return self.count

    def current(self, names: Iterable[str]) -> dict[str, Current]:
        return {name: self.topics[name] for name in names if name in self.topics}

    def create(self, changes: Sequence[Change], replication: int, dry_run: bool) -> None:
        self.calls.append(f"create {len(changes)} x{replication}{' dry' if dry_run else ''}")
        if not dry_run:
            for change in changes:
                config = {name: new for name, (_, new) in change.config.items()}
                self.topics[change.topic] = Current(change.partitions, replication, config)

    def update(self, changes: Sequence[Change], dry_run: bool) -> None:
        self.calls.append(f"update {len(changes)}{' dry' if dry_run else ''}")
        if not dry_run:
            for change in changes:
                old = self.topics[change.topic]
                config = {**old.config} | {name: new for name, (_, new) in change.config.items()}
                self.topics[change.topic] = Current(old.partitions, old.replication, config)

    def visible(self, wanted: Mapping[str, int]) -> bool:
        self.delay -= 1
        return self.delay < 0


def two_topics() -> TopicTable:
    topics = {
        "a": Topic("a", ("Task",), 8, {"cleanup.policy": "compact,delete", "retention.ms": "10"}),
        "b": Topic("b", (), 1, {"cleanup.policy": "compact"}),
    }
    return TopicTable(topics, 100, 8)


def in_line() -> dict[str, Current]:
    return {
        "a": Current(8, 1, {"cleanup.policy": "compact,delete", "retention.ms": "10", "segment.ms": "1"}),
        "b": Current(1, 1, {"cleanup.policy": "compact"}),
    }


def test_an_empty_broker_gets_every_topic_in_name_order() -> None:
    changes = plan(topic_table(), {})
    assert [change.topic for change in changes] == sorted(topic_table().topics)
    assert {change.kind for change in changes} == {ChangeKind.CREATE}


def test_a_broker_in_line_needs_nothing() -> None:
    assert plan(two_topics(), in_line()) == []


def test_the_order_within_a_cleanup_policy_does_not_matter() -> None:
    current = in_line()
    current["a"] = Current(8, 1, {**current["a"].config, "cleanup.policy": "delete,compact"})
    assert plan(two_topics(), current) == []


def test_a_differing_setting_is_updated_and_others_are_left() -> None:
    current = in_line()
    current["a"] = Current(8, 1, {**current["a"].config, "retention.ms": "99"})
    (change,) = plan(two_topics(), current)
    assert (change.kind, change.config) == (ChangeKind.UPDATE, {"retention.ms": ("99", "10")})
    assert str(change) == "retention.ms: 99 -> 10"


@pytest.mark.parametrize("partitions", [4, 16])
def test_another_partition_count_is_impossible_both_ways(partitions: int) -> None:
    current = in_line()
    current["a"] = Current(partitions, 1, current["a"].config)
    (change,) = plan(two_topics(), current)
    assert change.kind is ChangeKind.IMPOSSIBLE
    assert f"has {partitions} partitions where 8 are wanted" in change.reason


def test_topics_of_others_are_left_alone() -> None:
    assert plan(two_topics(), in_line() | {"theirs": Current(3, 1, {})}) == []


def test_nothing_is_changed_if_anything_is_impossible() -> None:
    broker = FakeBroker({"a": Current(4, 1, {})})
    with pytest.raises(Impossible, match="nothing was changed: a has 4 partitions"):
        admin.apply(broker, plan(two_topics(), broker.topics), dry_run=False)
    assert broker.calls == []


def test_applying_twice_changes_nothing_the_second_time() -> None:
    broker = FakeBroker({"b": Current(1, 1, {"cleanup.policy": "delete"})})
    admin.apply(broker, plan(two_topics(), broker.topics), dry_run=False)
    assert broker.calls == ["create 1 x1", "update 1"]
    assert plan(two_topics(), broker.topics) == []


def test_a_dry_run_reaches_the_broker_and_changes_nothing() -> None:
    broker = FakeBroker()
    admin.apply(broker, plan(two_topics(), {}), dry_run=True)
    assert broker.calls == ["create 2 x1 dry"]
    assert broker.topics == {}


def test_it_waits_until_created_topics_are_visible() -> None:
    broker = FakeBroker(delay=3)
    admin.apply(broker, plan(two_topics(), {}), dry_run=False)
    assert broker.delay < 0


def test_topics_that_never_become_visible_are_named() -> None:
    with pytest.raises(NotVisible, match="a, b did not become visible"):
        admin.apply(FakeBroker(delay=10**9), plan(two_topics(), {}), dry_run=False, timeout=0.1)


@pytest.mark.parametrize(
    ("brokers", "wanted", "replication", "in_sync"),
    [(1, None, 1, 1), (2, None, 2, 1), (3, None, 3, 2), (9, None, 3, 2), (3, 1, 1, 1), (5, 5, 5, 2)],
)
def test_replication_follows_the_number_of_brokers(
    brokers: int, wanted: int | None, replication: int, in_sync: int
) -> None:
    assert admin.replication_factor(brokers, wanted) == replication
    assert admin.min_in_sync(replication) == in_sync
