"""Kafka's ids of topics (KIP-516): what was recorded about a topic, compared with what the broker has. Pure.

A topic that is deleted and created again keeps its name and gets another id; its offsets begin at 0. Positions and
state that were made of the old topic do not apply to the new one. A stream application keeps two records of its
topics, so that one survives where the other is lost:

- the metadata of its committed offsets (`CommitNote`), which survives the loss of the changelog;
- a record on each partition of its changelog (`encode_sources`), which survives the loss of the inputs (Kafka deletes
  the committed offsets of a topic together with the topic).

A third one, on tentalis.topic-ids.v1 (`tentalis.kafka.topic_ids`), counts where both are lost.

Offsets and changelogs without these records come from earlier versions; they are accepted, and get them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tentalis.service.lifecycle import Unmendable

NOTE_VERSION = "t1"
NO_CHANGELOG = "-"
SOURCES_KEY = "tentalis/sources"
"""Changelog key of the ids of the inputs that the state is made of."""
MOST_PROOFS = 3
"""The number of different proofs that a description lists."""
STAMP_BYTES = 8
"""Length of the applied offset with which every changelog value begins."""


class TopicLost(Unmendable):
    """A topic was deleted, created again or cut off: work that this process has not finished would be lost."""


class PartitionsChanged(Exception):
    """A topic has another number of partitions than when this process started (ExitCode.DRIFT)."""


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """A topic on the broker: its id and its number of partitions."""

    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets of a partition: the first one, and the one after the last record."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The metadata of a committed offset: the ids of its topic and of the application's changelog (None without one),
    and the end of the changelog's partition when the offset was committed."""

    source: str
    changelog: str | None = None
    changelog_end: int = 0

    def text(self) -> str:
        """Returns the metadata, at most a hundred characters.

        >>> CommitNote("2jHqGx1kT", "b7uVn0cQR", 118).text()
        't1 2jHqGx1kT b7uVn0cQR 118'
        """
        return f"{NOTE_VERSION} {self.source} {self.changelog or NO_CHANGELOG} {self.changelog_end}"

    @classmethod
    def of(cls, metadata: str | None) -> "CommitNote | None":
        """Reads the metadata of a committed offset; None for that of an earlier version or of another program.

        confluent-kafka commits a text with the byte 0 that ends it.

        >>> CommitNote.of("t1 2jHqGx1kT - 0\\0")
        CommitNote(source='2jHqGx1kT', changelog=None, changelog_end=0)
        """
        parts = (metadata or "").removesuffix("\0").split(" ")
        if len(parts) != 4 or parts[0] != NOTE_VERSION or not (parts[3].isascii() and parts[3].isdigit()):
            return None
        return cls(parts[1], None if parts[2] == NO_CHANGELOG else parts[2], int(parts[3]))


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A committed offset, and its note if it has one."""

    offset: int
    note: CommitNote | None = None


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The record of one partition number of a stream application.

    Attributes:
        committed: by input topic.
        sources: the ids of the inputs, from the changelog; None if it does not have them.
        applied: greatest input offset that the state includes; -1 if unknown, as in an application with several inputs.
        registered: ids of the inputs and the changelog on tentalis.topic-ids.v1; empty without such a record. They
            count for a topic of which nothing else is recorded.
    """

    committed: Mapping[str, CommittedOffset]
    sources: Mapping[str, str] | None = None
    applied: int = -1
    registered: Mapping[str, str] = field(default_factory=dict)


class LossKind(StrEnum):
    """A way to lose a topic, or records of it. GONE: it does not exist. RECREATED: it has another id. CUT: it ends
    before a position that was reached. UNREAD: it begins after the next record to read, because retention or a trim
    removed records that were not read."""

    GONE = "is gone"
    RECREATED = "was deleted and created again"
    CUT = "ends before the recorded position"
    UNREAD = "has lost records that were not read"


@dataclass(frozen=True, slots=True)
class PartitionLoss:
    """One lost partition: how, and what proves it.

    Attributes:
        records: the offsets that were reached and are gone, an upper bound of the lost records; 0 if it is not known
            was reached. Records after them, which nobody had read, are lost as well and are not recorded anywhere. Of
            UNREAD: the offsets between the next one to read and the beginning of the log.
        of_state: True for a changelog.
        counted: False if it is not known how many records of state the changelog had.
        begin: of UNREAD: the first offset that is there.
    """

    topic: str
    partition: int
    kind: LossKind
    proof: str
    records: int
    of_state: bool = False
    counted: bool = True
    begin: int = 0


def encode_sources(sources: Mapping[str, str]) -> bytes:
    """Encodes the ids of input topics, for a record on the changelog."""
    return json.dumps(dict(sorted(sources.items())), separators=(",", ":")).encode()


def decode_sources(payload: bytes) -> dict[str, str]:
    """Decodes `encode_sources`. Raises ValueError."""
    found = json.loads(payload)
    if not isinstance(found, dict) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise ValueError(f"not a JSON object of topic ids: {payload[:64]!r}")
    return found


def recorded_sources(value: bytes) -> dict[str, str]:
    """Decodes a changelog value under SOURCES_KEY: an applied offset, then the ids. Raises ValueError."""
    return decode_sources(value[STAMP_BYTES:])


def partition_losses(
    partition: int,
    sources: Iterable[str],
    changelog: str | None,
    record: PartitionRecord,
    topics: Mapping[str, TopicIdentity],
    ranges: Mapping[tuple[str, int], OffsetRange],
) -> list[PartitionLoss]:
    """Compares what is recorded about a partition with the topics on the broker; returns what is lost, inputs first.

    Args:
        sources: the input topics.
        changelog: None for an application without state.
        topics: the inputs and the changelog that exist.
        ranges: the offsets of this partition in each of them.
    """
    found = []
    for source in sorted(sources):
        loss = _source_loss(source, partition, record, topics.get(source), ranges.get((source, partition)))
        if loss is not None:
            found.append(loss)
    notes = [each.note for each in record.committed.values() if each.note is not None and each.note.changelog]
    if changelog is not None:
        there = topics.get(changelog)
        if notes:
            loss = _changelog_loss(changelog, partition, notes, there, ranges.get((changelog, partition)))
        else:
            loss = _unnoted_changelog_loss(changelog, partition, record.registered.get(changelog), there)
        if loss is not None:
            found.append(loss)
    return found


def position_losses(
    topic: str,
    topic_id: str | None,
    positions: Mapping[int, int],
    topics: Mapping[str, TopicIdentity],
    ranges: Mapping[tuple[str, int], OffsetRange],
) -> list[PartitionLoss]:
    """Compares the id and the positions of a reader without state with its topic; returns what is lost.

    A position before the beginning of the log is no loss: the topic of such a reader is compacted, never cut off there.

    Args:
        topic_id: None in the records of versions that did not take it.
        positions: the first offset to read, per partition.
    """
    note = None if topic_id is None else CommitNote(topic_id)
    return [
        loss
        for partition, offset in sorted(positions.items())
        for loss in partition_losses(
            partition, [topic], None, PartitionRecord({topic: CommittedOffset(offset, note)}), topics, ranges
        )
        if loss.kind is not LossKind.UNREAD
    ]


def _source_loss(
    topic: str, partition: int, record: PartitionRecord, there: TopicIdentity | None, span: OffsetRange | None
) -> PartitionLoss | None:
    committed = record.committed.get(topic)
    note = None if committed is None else committed.note
    reached = max(0 if committed is None else committed.offset, record.applied + 1)
    recorded = [note.source] if note is not None else []
    if record.sources is not None and topic in record.sources:
        recorded.append(record.sources[topic])
    if not recorded and topic in record.registered:
        recorded.append(record.registered[topic])
    if there is None:
        if not reached and not recorded:
            return None
        proof = f"offset {reached} was reached" if reached or not recorded else f"its id was {recorded[0]}"
        return PartitionLoss(topic, partition, LossKind.GONE, proof, reached)
    end = 0 if span is None else span.end
    for before in recorded:
        if before != there.topic_id:
            proof = f"its id was {before} and is {there.topic_id}"
            return PartitionLoss(topic, partition, LossKind.RECREATED, proof, reached)
    if reached > end:
        proof = f"offset {reached} was reached, and the log ends at {end}"
        return PartitionLoss(topic, partition, LossKind.CUT, proof, reached - end)
    # Without a position it is not known whether anything was to be read: a new group begins where the log begins.
    if span is not None and reached < span.begin and (committed is not None or record.applied >= 0):
        proof = f"offset {reached} is the next one to read, and the log begins at {span.begin}"
        return PartitionLoss(topic, partition, LossKind.UNREAD, proof, span.begin - reached, begin=span.begin)
    return None


def _changelog_loss(
    topic: str, partition: int, notes: Sequence[CommitNote], there: TopicIdentity | None, span: OffsetRange | None
) -> PartitionLoss | None:
    reached = max(note.changelog_end for note in notes)
    if there is None:
        return PartitionLoss(topic, partition, LossKind.GONE, f"it had {reached} offsets", reached, of_state=True)
    end = 0 if span is None else span.end
    for note in notes:
        if note.changelog != there.topic_id:
            proof = f"its id was {note.changelog} and is {there.topic_id}"
            return PartitionLoss(topic, partition, LossKind.RECREATED, proof, note.changelog_end, of_state=True)
    if reached > end:
        proof = f"it had {reached} offsets and has {end}"
        return PartitionLoss(topic, partition, LossKind.CUT, proof, reached - end, of_state=True)
    return None


def _unnoted_changelog_loss(
    topic: str, partition: int, registered: str | None, there: TopicIdentity | None
) -> PartitionLoss | None:
    """Compares a changelog with its id on tentalis.topic-ids.v1: no committed offset tells of it."""
    if registered is None or (there is not None and there.topic_id == registered):
        return None
    kind = LossKind.GONE if there is None else LossKind.RECREATED
    proof = f"its id was {registered}" if there is None else f"its id was {registered} and is {there.topic_id}"
    return PartitionLoss(topic, partition, kind, proof, 0, of_state=True, counted=False)


def changes_while_running(
    before: Mapping[str, TopicIdentity], now: Mapping[str, TopicIdentity]
) -> tuple[str | None, str | None]:
    """Compares topics with what they were at the start of a process. Returns two descriptions, None without a change:
    of topics that were lost, and of topics with another number of partitions."""
    lost, resized = [], []
    for topic, was in sorted(before.items()):
        there = now.get(topic)
        if there is None:
            lost.append(f"{topic} {LossKind.GONE} (its id was {was.topic_id})")
        elif there.topic_id != was.topic_id:
            lost.append(f"{topic} {LossKind.RECREATED} (its id was {was.topic_id} and is {there.topic_id})")
        elif there.partitions != was.partitions:
            resized.append(f"{topic} had {was.partitions} partitions and has {there.partitions}")
    return "; ".join(lost) or None, "; ".join(resized) or None


def described(losses: Iterable[PartitionLoss]) -> str:
    """Describes losses, one sentence part per topic and kind: the topic, the proofs, the partitions, and what is lost.

    >>> described([PartitionLoss("a", p, LossKind.CUT, "it had 9 offsets and has 0", 9, of_state=True) for p in (0, 2)])
    'a ends before the recorded position (it had 9 offsets and has 0): partitions 0, 2, up to 18 records of state'
    """
    groups: dict[tuple[str, LossKind], list[PartitionLoss]] = {}
    for loss in losses:
        groups.setdefault((loss.topic, loss.kind), []).append(loss)
    return "; ".join(
        f"{topic} {kind} ({_proofs(found)}): partitions {numbers(each.partition for each in found)}, {_extent(found)}"
        for (topic, kind), found in groups.items()
    )


def _proofs(losses: Sequence[PartitionLoss]) -> str:
    """Lists the proofs, each with its partitions; at most MOST_PROOFS of them."""
    by_proof: dict[str, list[int]] = {}
    for loss in losses:
        by_proof.setdefault(loss.proof, []).append(loss.partition)
    if len(by_proof) == 1:
        return losses[0].proof
    parts = [f"partition {numbers(partitions)}: {proof}" for proof, partitions in by_proof.items()]
    more = len(parts) - MOST_PROOFS
    return "; ".join([*parts[:MOST_PROOFS], *([f"and {more} more"] if more > 0 else ())])


def _extent(losses: Sequence[PartitionLoss]) -> str:
    """Returns the number of lost records in words."""
    count = sum(loss.records for loss in losses)
    if losses[0].of_state:
        if all(loss.counted for loss in losses):
            return f"up to {count:,} records of state"
        return (
            f"up to {count:,} records of state, an unknown number more"
            if count
            else "an unknown number of records of state"
        )
    if losses[0].kind is LossKind.UNREAD:
        return f"up to {count:,} records"
    if not count:
        return "an unknown number of records"
    unknown = "" if all(loss.records for loss in losses) else ", an unknown number more"
    return f"up to {count:,} records that were read{unknown}, and any that were not read yet"


def numbers(values: Iterable[int]) -> str:
    """Lists numbers, consecutive ones as a range.

    >>> numbers([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
