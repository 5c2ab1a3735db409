"""Rebuilds the changelog of an application from its input topic: folds the log again and discards the outputs.

Only for an application whose state is a function of its input alone, with one input topic. Each partition is folded
from the first record that is still there up to the committed offset, by the same `BatchRunner` as in a live worker.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from schemas import topics
from streams.runtime.delivery import BatchRunner, changelog_record
from streams.runtime.dlq import LettersOnLog, Produce
from streams.runtime.log_reader import log_record
from streams.runtime.processor import LogRecord, Processor, applied_offset
from streams.runtime.state import Entry, StateStore
from streams.runtime.topic_guard import fence_entry, sources_entry
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import messages_to_end
from tentalis.kafka.identity import CommitNote, CommittedOffset, OffsetRange
from tentalis.kafka.offsets import commit_noted
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_client import TopicClient, committed_notes
from tentalis.service.settings import Settings
from tentalis.service.version import app_version

TIMEOUT_S = 30.0
REASON = "rebuilt from the input topic"
UNFINISHED = "rebuilding"
"""The changelog id in the notes of committed offsets while a state is being written."""


class CannotRebuildState(Exception):
    """The state cannot be rebuilt now; nothing was written."""


class _Discarded:
    """Takes the records of a fold, and keeps none. The changelog's have consecutive offsets."""

    def __init__(self, changelog: str) -> None:
        self._changelog, self._end = changelog, 0

    async def send(self, records: Sequence[Produce]) -> int:
        self._end += sum(record.topic == self._changelog for record in records)
        return self._end - 1


@dataclass(frozen=True, slots=True)
class RebuiltPartition:
    """The state of one partition. `begin` is the first offset that is still on the log: above 0, what was before it is
    not in the state. `end` is the committed offset."""

    partition: int
    begin: int
    end: int
    entries: Mapping[str, bytes]


async def fold_again(
    processor: Processor,
    partition: int,
    records: Iterator[LogRecord],
    batch: int = 1000,
    letters: LettersOnLog | None = None,
) -> dict[str, bytes]:
    """Returns the state that a fold of these records leaves, without those that `letters` names as skipped."""
    store, changelog = StateStore(), topics.changelog(processor.app_id, str(processor.table))
    runner = BatchRunner(
        processor,
        _Discarded(changelog),
        store=store,
        changelog=changelog,
        limits=DeadLetterLimits(run=sys.maxsize, ratio=1.0),
        record_limit=topics.table().record_limit_bytes,
        version=app_version(),
        letters=letters,
    )
    runner.take_over(partition)
    while some := list(islice(records, batch)):
        await runner.run(partition, some)
    processor.revoke(partition)
    return dict(store.entries(partition))


def state_digest(entries: Mapping[str, bytes]) -> str:
    """Returns the sha256 of a state, independent of the order of its entries."""
    sha = hashlib.sha256()
    for key, value in sorted(entries.items()):
        for part in (key.encode("utf-8", "surrogateescape"), value):
            sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()


class StateRebuild:
    """Rebuilds the state of one application. Its group must be inactive."""

    def __init__(self, settings: Settings, processor: Processor) -> None:
        self._settings, self._processor = settings, processor
        (self._source,) = processor.topics
        self._changelog = topics.changelog(processor.app_id, str(processor.table))
        self._client = TopicClient(settings)

    def check_inactive(self) -> None:
        """Raises CannotRebuildState if the group has members."""
        admin = AdminClient(client_config(self._settings))
        group = self._processor.app_id
        found = admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
        if found.members or found.state not in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD):
            raise CannotRebuildState(
                f"the group {group} is active ({len(found.members)} members): stop its processes first. A process that "
                "was killed counts as active until its session ends, after 10 s"
            )

    def spans(self) -> dict[int, OffsetRange]:
        """Per partition, the first offset on the log and the committed offset. Raises CannotRebuildState."""
        identities = self._client.identities([self._source, self._changelog])
        if missing := {self._source, self._changelog} - identities.keys():
            raise CannotRebuildState(
                f"{' and '.join(sorted(missing))}: no such topic. `tentalis topics apply --accept-loss` creates it"
            )
        places = [(self._source, partition) for partition in range(identities[self._source].partitions)]
        ranges = self._client.ranges(places)
        committed = committed_notes(self._settings, self._processor.app_id, places)
        if not committed:
            raise CannotRebuildState(
                f"the group {self._processor.app_id} has never committed an offset: there is no state to rebuild. "
                "Start the application"
            )
        for place, each in committed.items():
            other = each.note is not None and each.note.source != identities[self._source].topic_id
            if other or each.offset > ranges[place].end:
                raise CannotRebuildState(
                    f"the committed offset {each.offset} of {self._source}[{place[1]}] is not of this topic, which was "
                    "created again or cut off: start the application with --accept-loss instead"
                )
        return {place[1]: OffsetRange(ranges[place].begin, each.offset) for place, each in sorted(committed.items())}

    async def partition(self, partition: int, span: OffsetRange) -> RebuiltPartition:
        """Folds one partition again."""
        messages = messages_to_end(self._settings, self._source, end={partition: span.end})
        letters = WrittenLetters(self._settings)
        entries = await fold_again(self._processor, partition, map(log_record, messages), letters=letters)
        return RebuiltPartition(partition, span.begin, span.end, entries)

    def write(self, rebuilt: RebuiltPartition, publisher: Publisher) -> None:
        """Writes a state to the changelog. A fence record before it makes all earlier entries void."""
        sources = {self._source: self._client.identities([self._source])[self._source].topic_id}
        entries = [
            fence_entry(REASON),
            *(Entry(key, value, applied_offset(value)) for key, value in rebuilt.entries.items()),
            sources_entry(sources),
        ]
        for entry in entries:
            record = changelog_record(self._changelog, rebuilt.partition, entry)
            publisher.send_bytes(
                record.topic, record.key, record.value, list(record.headers), partition=rebuilt.partition
            )
        publisher.flush()

    def begin(self, spans: Mapping[int, OffsetRange]) -> None:
        """Commits the same offsets again without a changelog of this id: a state that is written in part is refused."""
        self._commit(spans, UNFINISHED, dict.fromkeys(spans, 0))

    def commit(self, spans: Mapping[int, OffsetRange]) -> None:
        """Commits the same offsets again, with the id and the ends of the changelog that is there now."""
        changelog = self._client.identities([self._changelog])[self._changelog].topic_id
        ranges = self._client.ranges((self._changelog, partition) for partition in spans)
        self._commit(spans, changelog, {partition: span.end for (_, partition), span in ranges.items()})

    def _commit(self, spans: Mapping[int, OffsetRange], changelog: str, ends: Mapping[int, int]) -> None:
        source = self._client.identities([self._source])[self._source].topic_id
        offsets = {
            (self._source, partition): CommittedOffset(span.end, CommitNote(source, changelog, ends[partition]))
            for partition, span in spans.items()
        }
        commit_noted(self._settings, self._processor.app_id, offsets)
