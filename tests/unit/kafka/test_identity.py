"""The recorded identities of topics, compared with the topics on the broker: the pure core."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.kafka.identity import (
    CommitNote,
    CommittedOffset,
    LossKind,
    OffsetRange,
    PartitionLoss,
    PartitionRecord,
    TopicIdentity,
    changes_while_running,
    decode_sources,
    described,
    encode_sources,
    numbers,
    partition_losses,
    position_losses,
)

SOURCE, CHANGELOG = "tentalis.halves.v1", "tentalis-join-state-changelog"
IDS = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=22, max_size=22).filter(
    lambda each: each != "-"
)
OFFSETS = st.integers(0, 2**62)


def found(
    record: PartitionRecord,
    source: str | None = "s1",
    source_end: int = 0,
    changelog: str | None = "c1",
    changelog_end: int = 0,
    source_begin: int = 0,
) -> list[PartitionLoss]:
    topics = {
        name: TopicIdentity(each, 8) for name, each in ((SOURCE, source), (CHANGELOG, changelog)) if each is not None
    }
    ranges = {(SOURCE, 3): OffsetRange(source_begin, source_end), (CHANGELOG, 3): OffsetRange(0, changelog_end)}
    return partition_losses(3, [SOURCE], CHANGELOG, record, topics, ranges)


def committed(offset: int, source: str = "s1", changelog: str | None = "c1", end: int = 0) -> PartitionRecord:
    note = CommitNote(source, changelog, end)
    return PartitionRecord({SOURCE: CommittedOffset(offset, note)}, {SOURCE: source}, offset - 1)


@given(IDS, st.none() | IDS, OFFSETS)
def test_a_note_is_read_as_it_was_written(source: str, changelog: str | None, end: int) -> None:
    note = CommitNote(source, changelog, end)
    assert CommitNote.of(note.text()) == note
    assert len(note.text()) < 100, "the broker's limit is 4096 bytes"


@given(st.text() | st.none())
def test_no_metadata_of_another_program_is_an_error(metadata: str | None) -> None:
    note = CommitNote.of(metadata)
    assert note is None or str(metadata).startswith("t1 ")


@pytest.mark.parametrize(
    "metadata", [None, "", "t2 a b 3", "t1 a b", "t1 a b -3", "t1 a b x", "t1 a b 3 c", "t1 a b ³"]
)
def test_what_is_no_note_is_left_alone(metadata: str | None) -> None:
    assert CommitNote.of(metadata) is None


@given(st.dictionaries(st.text(min_size=1), IDS))
def test_sources_are_read_as_they_were_written(sources: Mapping[str, str]) -> None:
    assert decode_sources(encode_sources(sources)) == sources


@given(OFFSETS, OFFSETS, OFFSETS, OFFSETS, st.booleans())
def test_topics_that_only_grew_lose_nothing(
    offset: int, further: int, changelog_end: int, written: int, noted: bool
) -> None:
    record = committed(offset, end=changelog_end)
    if not noted:  # an earlier version
        record = PartitionRecord({SOURCE: CommittedOffset(offset)})
    assert found(record, source_end=offset + further, changelog_end=changelog_end + written) == []


@given(OFFSETS, OFFSETS, OFFSETS)
def test_another_id_is_a_loss_however_long_the_new_topic_is(offset: int, source_end: int, changelog_end: int) -> None:
    record = committed(offset, end=5)
    (loss,) = found(record, "s2", source_end, "c1", 5 + changelog_end)
    assert (loss.topic, loss.kind, loss.records) == (SOURCE, LossKind.RECREATED, offset), "not what the new topic has"
    (loss,) = found(record, "s1", offset, "c2", changelog_end)
    assert (loss.topic, loss.kind, loss.records) == (CHANGELOG, LossKind.RECREATED, 5)


@given(OFFSETS, st.integers(1, 2**62))
def test_either_record_alone_shows_the_loss(offset: int, cut: int) -> None:
    witness = PartitionRecord({}, {SOURCE: "s1"}, offset - 1)  # Kafka deleted the committed offsets with the topic
    assert [loss.kind for loss in found(witness, "s2")] == [LossKind.RECREATED]
    assert found(witness, "s1", offset) == []
    note = PartitionRecord({SOURCE: CommittedOffset(offset, CommitNote("s1", "c1", cut))})  # the changelog is gone
    assert [loss.kind for loss in found(note, source_end=offset, changelog="c2")] == [LossKind.RECREATED]
    (loss,) = found(note, source_end=offset, changelog_end=0)
    assert (loss.kind, loss.records) == (LossKind.CUT, cut)


@given(OFFSETS, st.integers(1, 2**62))
def test_a_log_that_ends_below_what_was_reached_is_cut(end: int, ahead: int) -> None:
    by_commit = PartitionRecord({SOURCE: CommittedOffset(end + ahead)})
    by_state = PartitionRecord({}, None, end + ahead - 1)
    for record in (by_commit, by_state):
        (loss,) = found(record, source_end=end)
        assert (loss.topic, loss.kind, loss.records) == (SOURCE, LossKind.CUT, ahead)


@given(OFFSETS, st.integers(1, 2**62), st.booleans())
def test_records_that_retention_removed_before_they_were_read_are_lost(offset: int, unread: int, noted: bool) -> None:
    record = committed(offset) if noted else PartitionRecord({SOURCE: CommittedOffset(offset)})
    begin = offset + unread
    (loss,) = found(record, source_begin=begin, source_end=begin)
    assert (loss.topic, loss.kind, loss.records, loss.begin) == (SOURCE, LossKind.UNREAD, unread, begin)
    assert described([loss]).endswith(f"partitions 3, up to {unread:,} records")


@given(OFFSETS, st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_log_that_begins_where_reading_continues_or_before_has_lost_nothing(read: int, kept: int, more: int) -> None:
    offset = read + kept
    assert found(committed(offset), source_begin=read, source_end=offset + more) == []
    ahead = PartitionRecord({SOURCE: CommittedOffset(read, CommitNote("s1", "c1", 0))}, applied=offset - 1)
    assert found(ahead, source_begin=offset, source_end=offset) == [], "the state has what the offset does not tell of"
    new = PartitionRecord({}, registered={SOURCE: "s1", CHANGELOG: "c1"})
    assert found(new, source_begin=offset, source_end=offset) == [], "nothing was read, and so nothing was skipped"


@given(st.integers(0, 2**62), st.integers(1, 2**62))
def test_the_state_tells_of_unread_records_when_the_committed_offsets_have_expired(read: int, unread: int) -> None:
    record = PartitionRecord({}, {SOURCE: "s1"}, applied=read)
    (loss,) = found(record, source_begin=read + 1 + unread, source_end=read + 1 + unread)
    assert (loss.kind, loss.records) == (LossKind.UNREAD, unread)


def test_another_topic_is_not_told_apart_by_where_it_begins() -> None:
    (loss,) = found(committed(3), source="s2", source_begin=9, source_end=9)
    assert loss.kind is LossKind.RECREATED


def test_a_reader_of_a_compacted_topic_skips_nothing() -> None:
    there, span = {SOURCE: TopicIdentity("s1", 1)}, {(SOURCE, 0): OffsetRange(7, 9)}
    assert position_losses(SOURCE, "s1", {0: 5}, there, span) == []


def test_a_missing_topic_is_gone() -> None:
    losses = found(committed(9, end=4), source=None, changelog=None)
    assert [(loss.topic, loss.kind, loss.records) for loss in losses] == [
        (SOURCE, LossKind.GONE, 9),
        (CHANGELOG, LossKind.GONE, 4),
    ]


def test_an_application_without_state_has_no_changelog_to_lose() -> None:
    record = PartitionRecord({SOURCE: CommittedOffset(9, CommitNote("s1"))})
    topics = {SOURCE: TopicIdentity("s1", 8)}
    assert partition_losses(3, [SOURCE], None, record, topics, {(SOURCE, 3): OffsetRange(0, 9)}) == []


def test_running_processes_see_what_changed() -> None:
    before = {"a": TopicIdentity("1", 8), "b": TopicIdentity("2", 8), "c": TopicIdentity("3", 8)}
    assert changes_while_running(before, before | {"d": TopicIdentity("4", 1)}) == (None, None)
    now = {"a": TopicIdentity("9", 16), "b": TopicIdentity("2", 16)}
    lost, resized = changes_while_running(before, now)
    assert lost == "a was deleted and created again (its id was 1 and is 9); c is gone (its id was 3)"
    assert resized == "b had 8 partitions and has 16"


def test_losses_are_described_by_topic() -> None:
    losses = [PartitionLoss("a", p, LossKind.RECREATED, "its id was 1 and is 2", 10) for p in (0, 1, 2, 5)]
    losses.append(PartitionLoss("b", 0, LossKind.GONE, "it had 7 offsets", 7, of_state=True))
    assert described(losses) == (
        "a was deleted and created again (its id was 1 and is 2): partitions 0-2, 5, up to 40 records that were read, "
        "and any that were not read yet; b is gone (it had 7 offsets): partitions 0, up to 7 records of state"
    )


def test_each_partition_has_its_own_proof() -> None:
    ends = (9, 5, 9, 4, 3)
    losses = [PartitionLoss("a", p, LossKind.CUT, f"it had {n} offsets", n, of_state=True) for p, n in enumerate(ends)]
    assert described(losses) == (
        "a ends before the recorded position (partition 0, 2: it had 9 offsets; partition 1: it had 5 offsets; "
        "partition 3: it had 4 offsets; and 1 more): partitions 0-4, up to 30 records of state"
    )


def test_a_number_that_is_not_recorded_is_unknown_and_not_zero() -> None:
    losses = [PartitionLoss("a", p, LossKind.RECREATED, "its id was 1 and is 2", 0) for p in (0, 1)]
    assert described(losses).endswith("partitions 0-1, an unknown number of records")
    some = [*losses, PartitionLoss("a", 2, LossKind.RECREATED, "its id was 1 and is 2", 3)]
    text = "up to 3 records that were read, an unknown number more, and any that were not read yet"
    assert described(some).endswith(text)


@given(st.sets(st.integers(0, 200)))
def test_ranges_name_every_number_once(values: set[int]) -> None:
    named: list[int] = []
    for part in numbers(values).split(", ") if values else []:
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(values)


REGISTERED = {SOURCE: "s1", CHANGELOG: "c1"}


@pytest.mark.parametrize(
    ("source", "changelog", "kind", "proofs"),
    [
        ("s2", "c2", LossKind.RECREATED, ("its id was s1 and is s2", "its id was c1 and is c2")),
        (None, None, LossKind.GONE, ("its id was s1", "its id was c1")),
    ],
)
def test_input_and_changelog_lost_together_are_known_by_the_registered_ids(
    source: str | None, changelog: str | None, kind: LossKind, proofs: tuple[str, str]
) -> None:
    alone = PartitionRecord({})
    assert found(alone, source=source, changelog=changelog) == [], "nothing else tells of this loss"
    record = PartitionRecord({}, registered=REGISTERED)
    assert found(record) == []
    losses = found(record, source=source, changelog=changelog)
    assert losses == [
        PartitionLoss(SOURCE, 3, kind, proofs[0], 0),
        PartitionLoss(CHANGELOG, 3, kind, proofs[1], 0, of_state=True, counted=False),
    ]
    said = described(losses)
    assert "partitions 3, an unknown number of records;" in said and said.endswith("unknown number of records of state")


def test_the_registered_ids_give_way_to_what_an_application_recorded_later() -> None:
    accepted = CommittedOffset(4, CommitNote("s2", "c2", 9))
    record = PartitionRecord({SOURCE: accepted}, {SOURCE: "s2"}, registered=REGISTERED)
    assert found(record, source="s2", source_end=4, changelog="c2", changelog_end=9) == []


def test_the_registered_id_tells_of_a_changelog_when_the_committed_offsets_have_expired() -> None:
    record = PartitionRecord({}, None, registered=REGISTERED)
    assert [each.topic for each in found(record, changelog="c2")] == [CHANGELOG]


def test_uncounted_records_of_state_are_said_to_be() -> None:
    def loss(partition: int, records: int) -> PartitionLoss:
        return PartitionLoss("c", partition, LossKind.GONE, "it is", records, of_state=True, counted=records > 0)

    assert described([loss(0, 7), loss(1, 0)]).endswith("up to 7 records of state, an unknown number more")
