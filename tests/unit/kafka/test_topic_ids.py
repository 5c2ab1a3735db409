"""The records of topic ids, compared with the topics on the broker: the pure core."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.kafka.identity import LossKind, TopicIdentity
from tentalis.kafka.topic_ids import (
    ALL_TOPICS,
    TopicIdRecords,
    encoded,
    lost,
    moved,
    partition_key,
    records_of,
    to_record,
)

TOPICS = {name: TopicIdentity(f"{name}1", 1) for name in ("a", "b", "c")}
NAMES = st.sampled_from(["a", "b", "c", "d"])
IDS = st.dictionaries(NAMES, st.sampled_from(["a1", "b1", "c1", "other"]))


@given(st.dictionaries(st.tuples(st.sampled_from(["tentalis-join", "x/y"]), st.integers(0, 64)), IDS), IDS)
def test_records_are_read_as_they_were_written(partitions: dict[tuple[str, int], dict[str, str]], ids: object) -> None:
    assert isinstance(ids, dict)
    written = [(partition_key(*place), encoded(each)) for place, each in partitions.items()]
    assert records_of([*written, (ALL_TOPICS, encoded(ids))]) == TopicIdRecords(ids, partitions)


def test_the_newest_record_of_a_key_counts_and_a_removed_one_does_not() -> None:
    found = records_of(
        [
            (ALL_TOPICS, encoded({"a": "old"})),
            ("join/0", encoded({"a": "old"})),
            (ALL_TOPICS, encoded({"a": "new"})),
            ("join/0", None),
        ]
    )
    assert found == TopicIdRecords({"a": "new"})


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b'{"a": 1}', b"null"])
def test_a_value_that_is_no_record_counts_as_missing_and_is_named(value: bytes) -> None:
    given_before = [(ALL_TOPICS, encoded({"a": "a1"})), ("join/3", encoded({"a": "a1"}))]
    found = records_of([*given_before, (ALL_TOPICS, value), ("join/3", value)])
    assert found == TopicIdRecords(None, {}, (ALL_TOPICS, "join/3"))


@pytest.mark.parametrize("key", [None, "", "other", "join/", "/3", "join/x", "join/³", "topics/"])
def test_a_key_of_something_else_is_passed_over(key: str | None) -> None:
    assert records_of([(key, b"anything")]) == TopicIdRecords()


def test_only_topics_with_another_id_or_none_are_lost() -> None:
    recorded = {"a": "a1", "b": "before", "gone": "g1", "unasked": "u1"}
    found = lost(recorded, ["a", "b", "c", "gone"], TOPICS)
    assert {name: each.kind for name, each in found.items()} == {"b": LossKind.RECREATED, "gone": LossKind.GONE}
    assert str(found["b"]) == "b was deleted and created again (its id was before and is b1)"
    assert str(found["gone"]) == "gone is gone (its id was g1)"


@given(IDS | st.none())
def test_what_was_recorded_is_not_lost_and_not_recorded_again(before: dict[str, str] | None) -> None:
    after = {**(before or {}), **to_record(before, ["a", "b", "c"], TOPICS)}
    assert {name: after[name] for name in TOPICS} == {"a": "a1", "b": "b1", "c": "c1"}
    assert to_record(after, [*TOPICS], TOPICS) == {} == lost(after, [*TOPICS], TOPICS)


def test_a_move_replaces_the_ids_and_gives_new_partitions_a_record() -> None:
    records = TopicIdRecords({"a": "a1", "b": "b1"}, {("join", 0): {"a": "a1"}, ("join", 1): {"a": "a1"}})
    assert moved(records, {"a": ("a1", "a2")}, {"join": 3, "scoring": 3}) == {
        ALL_TOPICS: {"a": "a2", "b": "b1"},
        "join/0": {"a": "a2"},
        "join/1": {"a": "a2"},
        "join/2": {"a": "a2"},
    }
    assert moved(TopicIdRecords(), {"a": ("a1", "a2")}, {"join": 3}) == {}


def test_a_move_does_not_hide_a_topic_that_was_lost_before() -> None:
    records = TopicIdRecords({"a": "a0"}, {("join", 0): {"a": "a0"}})
    assert moved(records, {"a": ("a1", "a2")}, {"join": 1}) == {ALL_TOPICS: {"a": "a0"}, "join/0": {"a": "a0"}}
