"""Moves the keyed topics to another number of partitions.

The copy is made and checked first; a failure until then leaves the topics as they were, and the next run starts over.
Then the move is recorded on the broker, the old topics are deleted, and new ones are made from the copies. From the
record on, a run that was killed is finished by the next one, topic by topic.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from schemas import topics
from schemas.ids import derived_id
from schemas.place import RecordPlace
from schemas.records import AuditRecord
from tentalis.kafka import topic_ids, topology
from tentalis.kafka.admin import Description
from tentalis.kafka.codec import make_codec
from tentalis.kafka.identity import CommitNote, CommittedOffset, OffsetRange, TopicIdentity
from tentalis.kafka.moved_topics import MOVED, moved_text
from tentalis.kafka.offsets import commit_noted
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_id_log import read_topic_ids, write_topic_ids
from tentalis.ops.repartition.broker import MoveBroker
from tentalis.ops.repartition.copying import Copied, Writer, copy_topic, copy_unchanged, read_back
from tentalis.ops.repartition.digests import PartitionDigests
from tentalis.ops.repartition.placement import Headers, targets
from tentalis.ops.repartition.plan import MARKER, SUFFIX, TopicMove, UnfinishedMove
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

SOURCE = "tentalis-repartition"
NO_TOPIC = TopicIdentity("", 0)
StateRecord = tuple[int, bytes, bytes, Headers]
"""A record of a changelog: partition, key, value, headers."""


class CannotRepartition(Exception):
    """The topics cannot be moved now; nothing was changed."""


class CopyDiffers(Exception):
    """A copy does not have the records that were written to it; the topics that it was made from are unchanged."""


@dataclass(frozen=True, slots=True)
class StateOffsets:
    """The places, in the copies of an application's inputs, of the records that its state refers to.

    Attributes:
        places: new places by old ones.
        consumed: the first offset that is not processed, by topic and old partition.
        begin: the first offset to read, by topic and new partition.
    """

    places: Mapping[RecordPlace, RecordPlace]
    consumed: Mapping[tuple[str, int], int]
    begin: Mapping[tuple[str, int], int]


class StateMover(Protocol):
    """Moves the state of one stream application."""

    application: topology.Application

    def places(self) -> Iterable[RecordPlace]:
        """Reads the state; returns the records of the inputs that it needs again."""

    def records(self, partitions: int, offsets: StateOffsets) -> Iterable[StateRecord]:
        """Returns the records of the new changelog."""

    def sources(self, ids: Mapping[str, str]) -> tuple[bytes, bytes]:
        """Returns key and value of the changelog's record of the ids of the inputs."""


@dataclass(frozen=True, slots=True)
class TopicToMove:
    """A topic to move: its partitions, and an upper bound of its records."""

    topic: str
    partitions: int
    records: int


class Repartition:
    """The move of a stack's keyed topics. Its processes must be stopped. `movers`: those of all stream applications."""

    def __init__(self, settings: Settings, movers: Sequence[StateMover]) -> None:
        self._settings, self._movers = settings, movers
        self._broker = MoveBroker(settings)
        self._changelogs = [name for mover in movers for name in mover.application.changelogs]
        self._names = (*topics.table().co_partitioned, *self._changelogs)

    def unfinished(self) -> UnfinishedMove | None:
        """Returns the move that was interrupted after its copies were complete."""
        return self._broker.unfinished()

    def plan(self, partitions: int) -> list[TopicToMove]:
        """Returns the topics to move; empty if they have this number of partitions. Raises CannotRepartition."""
        found = [
            TopicToMove(each.name, len(each.partitions), sum(p.end - p.start for p in each.partitions))
            for each in self._broker.describe(self._names)
        ]
        if missing := sorted(set(self._names) - {each.topic for each in found}):
            raise CannotRepartition(f"{', '.join(missing)}: no such topic. `tentalis topics apply` creates it")
        most = max(each.partitions for each in found)
        if partitions < most:
            raise CannotRepartition(
                f"a topic has {most} partitions already: give at least so many. Fewer are not possible"
            )
        return [] if all(each.partitions == partitions for each in found) else found

    def check_stopped(self) -> None:
        """Raises GroupsActive if processes of the stack are running."""
        self._broker.check_stopped(self._names)

    # --- the copies -------------------------------------------------------------------------------------------------

    def copy(self, partitions: int) -> UnfinishedMove:
        """Copies all topics and states beside the old ones, checks the copies and records the move. Raises
        CannotRepartition, CopyDiffers."""
        self.check_stopped()
        self._broker.delete([name + SUFFIX for name in self._names])
        described = {each.name: each for each in self._broker.describe(self._names)}
        ids = {name: each.topic_id for name, each in self._broker.identities(self._names).items()}
        moves = {
            name: TopicMove(
                name,
                ids[name],
                min(len(p.replicas) for p in each.partitions),
                dict(each.config),
                [p.end for p in each.partitions],
                (),
                (),
            )
            for name, each in described.items()
        }
        self._broker.create({name + SUFFIX: move for name, move in moves.items()}, partitions)
        committed = self._broker.committed(self._readers())
        wanted = frozenset(place for mover in self._movers for place in mover.places())
        copied = {
            name: self._copy(described[name], partitions, committed, wanted) for name in topics.table().co_partitioned
        }
        begin = {
            group: {
                topic: [copied[topic].begin.get(group, {}).get(p, count) for p, count in enumerate(counts)]
                for topic in consumed
                for counts in (copied[topic].digests.counts,)
            }
            for group, consumed in committed.items()
        }
        digests = {name: each.digests for name, each in copied.items()}
        for mover in self._movers:
            (changelog,) = mover.application.changelogs
            digests[changelog] = self._copy_state(mover, changelog, partitions, committed, copied, begin)
        for name, written in digests.items():
            if read_back(self._settings, name + SUFFIX, written.counts).hex() != written.hex():
                raise CopyDiffers(f"{name}{SUFFIX} differs from what was written to it; run this again")
        self._check_unchanged(described, ids)
        move = UnfinishedMove(
            partitions,
            [replace(each, counts=digests[name].counts, digests=digests[name].hex()) for name, each in moves.items()],
            begin,
        )
        self._broker.begin(move)
        return move

    def _readers(self) -> dict[str, list[str]]:
        """The consumer groups whose offsets move, with their topics. The trainer's position is in its checkpoints."""
        found = {}
        for group in self._broker.groups():
            for each in topology.APPLICATIONS:
                names = [name for name in each.consumes if name in self._names]
                if each.group is not None and each.has_group(group) and names and not each.transactional:
                    found[group] = names
        return found

    def _copy(
        self,
        topic: Description,
        partitions: int,
        committed: Mapping[str, Mapping[str, Mapping[int, int]]],
        wanted: frozenset[RecordPlace],
    ) -> Copied:
        log.info("copying %s", topic.name)
        return copy_topic(
            self._settings,
            topic.name,
            {each.partition: OffsetRange(each.start, each.end) for each in topic.partitions},
            topic.name + SUFFIX,
            partitions,
            lambda message, headers, unread: targets(
                topic.name, message, headers, len(topic.partitions), partitions, unread=unread
            ),
            {group: consumed[topic.name] for group, consumed in committed.items() if topic.name in consumed},
            wanted,
        )

    def _copy_state(
        self,
        mover: StateMover,
        changelog: str,
        partitions: int,
        committed: Mapping[str, Mapping[str, Mapping[int, int]]],
        copied: Mapping[str, Copied],
        begin: Mapping[str, Mapping[str, Sequence[int]]],
    ) -> PartitionDigests:
        group = mover.application.consumer_group()
        offsets = StateOffsets(
            {old: new for topic in mover.application.consumes for old, new in copied[topic].places.items()},
            {(topic, p): offset for topic, each in committed.get(group, {}).items() for p, offset in each.items()},
            {
                (topic, p): begin.get(group, {}).get(topic, [0] * partitions)[p]
                for topic in mover.application.consumes
                for p in range(partitions)
            },
        )
        writer, now = Writer(self._settings, changelog + SUFFIX, partitions), now_ms()
        for partition, key, value, headers in mover.records(partitions, offsets):
            writer.write(partition, key, value, headers, now)
        writer.flush()
        return writer.digests

    def _check_unchanged(self, before: Mapping[str, Description], ids: Mapping[str, str]) -> None:
        """Raises CannotRepartition if a topic was written to, or created again, while it was copied."""
        self.check_stopped()
        now = {each.name: each for each in self._broker.describe(self._names)}
        identities = self._broker.identities(self._names)
        changed = [
            name
            for name, each in before.items()
            if name not in now
            or identities[name].topic_id != ids[name]
            or [p.end for p in now[name].partitions] != [p.end for p in each.partitions]
        ]
        if changed:
            raise CannotRepartition(
                f"{', '.join(changed)} changed while it was copied: stop every process that writes to it, gateways and "
                "managers too, then run this again. The topics are as they were"
            )

    # --- from the copies to the topics ------------------------------------------------------------------------------

    def finish(self, move: UnfinishedMove) -> None:
        """Makes the topics from their copies. Raises GroupsActive, CopyDiffers."""
        self.check_stopped()
        if move.done:
            self._clean_up(move)
            return
        there = self._broker.identities([each.name for each in move.topics])
        self._check_old(move, there)
        todo = [each for each in move.topics if not self._is_made(each, there.get(each.name), move.partitions)]
        self._broker.delete([each.name for each in todo])
        self._broker.create({each.name: each for each in todo}, move.partitions)
        for each in todo:
            log.info("making %s from its copy", each.name)
            written = copy_unchanged(self._settings, each.copy, each.name, each.counts)
            if written.hex() != list(each.digests) or not self._same(each):
                raise CopyDiffers(f"{each.name} differs from its copy {each.copy}: run this again")
        self._resume(move)
        # From here on the copies are not needed, and retention may remove records that they have.
        self._broker.record(replace(move, done=True))
        self._clean_up(move)

    def _check_old(self, move: UnfinishedMove, there: Mapping[str, TopicIdentity]) -> None:
        """Raises CannotRepartition if an old topic was written to since it was copied."""
        old = {each.name: each for each in move.topics if there.get(each.name, NO_TOPIC).topic_id == each.topic_id}
        changed = [
            each.name for each in self._broker.describe(old) if [p.end for p in each.partitions] != old[each.name].ends
        ]
        if not changed:
            return
        if len(old) == len(move.topics):
            self._broker.delete([MARKER])
            raise CannotRepartition(
                f"{', '.join(changed)} changed after it was copied: stop every process that writes to it, run this "
                "again. It starts over; the topics are as they were"
            )
        raise CannotRepartition(
            f"{', '.join(changed)} changed after it was copied, when others were moved already. Its records since "
            "then are not in the copy: save them with `tentalis consume`, delete the topic, then run this again"
        )

    def _is_made(self, move: TopicMove, now: TopicIdentity | None, partitions: int) -> bool:
        new = now is not None and now.topic_id != move.topic_id and now.partitions == partitions
        return new and self._same(move)

    def _clean_up(self, move: UnfinishedMove) -> None:
        for each in move.topics:
            self._broker.settle(each)
        self._broker.delete([name + SUFFIX for name in self._names])
        self._broker.delete([MARKER])

    def _same(self, move: TopicMove) -> bool:
        """True if the topic begins with the records of its copy."""
        ranges = self._broker.client.ranges((move.name, p) for p in range(len(move.counts)))
        if any(ranges[move.name, p].begin > 0 or ranges[move.name, p].end < n for p, n in enumerate(move.counts)):
            return False
        return read_back(self._settings, move.name, move.counts).hex() == list(move.digests)

    def _resume(self, move: UnfinishedMove) -> None:
        """Writes what tells the processes that these are their topics: ids on the changelogs, committed offsets with
        notes, the records of topic ids, and a record for the trainer."""
        ids = {name: each.topic_id for name, each in self._broker.identities(self._names).items()}
        used = {each.name: any(each.counts) for each in move.topics}
        for mover in self._movers:
            (changelog,) = mover.application.changelogs
            if used[changelog]:
                key, value = mover.sources({name: ids[name] for name in mover.application.consumes})
                writer = Writer(self._settings, changelog, move.partitions)
                for partition in range(move.partitions):
                    writer.write(partition, key, value, (), now_ms())
                writer.flush()
        ends = self._broker.client.ranges((name, p) for name in self._changelogs for p in range(move.partitions))
        changelog_of = {each.consumer_group(): each.changelogs[0] for each in topology.streams()}
        for group, consumed in move.begin.items():
            state = changelog_of.get(group)
            commit_noted(
                self._settings,
                group,
                {
                    (topic, p): CommittedOffset(
                        offset,
                        None if state is None else CommitNote(ids[topic], ids[state], ends[state, p].end),
                    )
                    for topic, offsets in consumed.items()
                    for p, offset in enumerate(offsets)
                },
            )
        records = topic_ids.moved(
            read_topic_ids(self._settings),
            {each.name: (each.topic_id, ids[each.name]) for each in move.topics},
            {each.app_id: move.partitions for each in topology.streams()},
        )
        write_topic_ids(self._settings, SOURCE, records)
        publisher = Publisher(self._settings, SOURCE, make_codec(self._settings))
        for each in move.topics:
            if each.name in (topics.ROLLOUTS, topics.HALVES):
                publisher.send(topics.AUDIT, audit_of(each, ids[each.name]))
        publisher.flush()


def audit_of(move: TopicMove, topic_id: str) -> AuditRecord:
    """Returns the record by which trainer and verifier know that a topic with another id has the same records."""
    return AuditRecord(
        audit_id=derived_id("topic-moved", move.topic_id, topic_id),
        event_time=now_ms(),
        component=SOURCE,
        topic=move.name,
        partition=0,
        offset=sum(move.counts),
        record_type=MOVED,
        record_id=moved_text(move.topic_id, topic_id),
        sha256=hashlib.sha256("".join(move.digests).encode()).hexdigest(),
    )
