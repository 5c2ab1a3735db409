"""Checks the topics of an application against what it recorded about them: before its first output, and while it runs.

`tentalis.kafka.identity` decides; this module asks the broker, and keeps the runtime's own records on the changelog
apart from the state of the application.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from schemas import topics
from streams.runtime.dlq import Produce
from streams.runtime.processor import stamped
from streams.runtime.state import Entry, RestartableReading
from tentalis.kafka import topic_ids
from tentalis.kafka.errors import ELECTING, Forbidden
from tentalis.kafka.identity import (
    SOURCES_KEY,
    CommitNote,
    CommittedOffset,
    PartitionLoss,
    PartitionRecord,
    TopicIdentity,
    TopicLost,
    encode_sources,
    partition_losses,
    recorded_sources,
)
from tentalis.kafka.topic_client import TopicClient, committed_offset
from tentalis.kafka.topic_id_log import read_topic_ids
from tentalis.kafka.topic_watch import LOOKS_BEFORE_GONE, check_changes, check_even
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")
FetchNotes = Callable[[Sequence[tuple[str, int]]], Awaitable[Mapping[tuple[str, int], Any]]]

FENCE_KEY = "tentalis/fence"
"""Changelog key of the record before which all entries are void: the state was given up there."""
PATIENCE_S = 30.0
RETRY_S = 0.3


class ChangelogReading:
    """Reads one changelog partition into its state (`fold`), without the runtime's own records. A fence empties the
    state."""

    def __init__(self, fold: RestartableReading) -> None:
        self._fold = fold
        self.applied = -1
        """Greatest applied offset of an entry that was read."""

    @property
    def sources(self) -> dict[str, str] | None:
        """The ids of the inputs that the state is made of, None if they are not recorded."""
        return None if self._fold.sources is None else recorded_sources(self._fold.sources)

    @property
    def position(self) -> int:
        """The offset to read from."""
        return self._fold.position

    def add(self, entry: Entry) -> None:
        """Takes the next record, in log order."""
        if entry.key == SOURCES_KEY:
            self._fold.sources = entry.value
        elif entry.key == FENCE_KEY:
            self._fold.restart()
            self.applied = -1
        else:
            self._fold.add(entry)
            self.applied = max(self.applied, entry.offset)

    def settle(self, position: int) -> None:
        """Notes that everything before `position` was added."""
        self._fold.settle(position)


def sources_entry(sources: Mapping[str, str]) -> Entry:
    """The changelog entry with the ids of the inputs."""
    return Entry(SOURCES_KEY, stamped(0, encode_sources(sources)), 0)


def fence_entry(reason: str) -> Entry:
    """The changelog entry that voids all entries before it."""
    return Entry(FENCE_KEY, stamped(0, reason.encode()), 0)


class TopicGuard:
    """The ids and partition counts of an application's topics.

    Args:
        application: its name on tentalis.topic-ids.v1.
        sources: the input topics.
        changelog: None for an application without state.
        outputs: topics that it writes; those that exist are watched like the inputs.
        fetch_notes: returns the committed offsets of the group with their metadata, as aiokafka does.
    """

    def __init__(
        self,
        settings: Settings,
        application: str,
        sources: Sequence[str],
        changelog: str | None,
        fetch_notes: FetchNotes,
        outputs: Collection[str] = (),
    ) -> None:
        self._settings, self._fetch_notes, self._application = settings, fetch_notes, application
        self._sources, self._changelog = tuple(sources), changelog
        self._outputs = frozenset(outputs) - {*sources}
        self._client: TopicClient | None = None
        self._identities: dict[str, TopicIdentity] = {}
        self._registered: dict[int, Mapping[str, str]] | None = None
        """By partition, the ids on tentalis.topic-ids.v1 as of the last `look`; None if there is no such topic."""
        self._missed = 0

    @property
    def source_ids(self) -> dict[str, str]:
        """The ids of the inputs, as of the last `look`."""
        return {topic: self._identities[topic].topic_id for topic in self._sources}

    def note(self, topic: str, changelog_end: int) -> str:
        """The metadata for a committed offset of an input."""
        changelog = None if self._changelog is None else self._identities[self._changelog].topic_id
        return CommitNote(self._identities[topic].topic_id, changelog, changelog_end).text()

    async def look(self, partitions: Mapping[str, int]) -> None:
        """Takes the ids of the topics for `note` and for `check_running`.

        Args:
            partitions: the partition count of each input when the process started.
        Raises:
            PartitionsChanged: a topic has another number of partitions now, or the keyed topics have different ones.
            TopicLost: a topic is gone (the broker has not known it for TOPIC_PATIENCE_S seconds), or has another id
                than at the look before.
        """
        found = await self._ask(lambda client: client.known_identities(self._topics))
        before = {
            topic: TopicIdentity(found[topic].topic_id, count) for topic, count in partitions.items() if topic in found
        }
        gone = sorted(set(self._topics) - found.keys())
        if gone:
            raise TopicLost(f"{', '.join(gone)}: deleted since this process started. {WAYS_ON}")
        written = await self._ask(lambda client: client.identities(self._outputs))
        found |= written
        before |= {topic: was for topic, was in self._identities.items() if topic in found}
        check_changes(before, found, WAYS_ON)
        check_even(found)
        self._identities, self._missed = found, 0
        self._registered = await self._read_registered()

    async def committed(self, partitions: Collection[int]) -> dict[tuple[str, int], CommittedOffset]:
        """The committed offsets of the group in these partitions of the inputs, with their notes."""
        found = await self._fetch_notes([(topic, partition) for topic in self._sources for partition in partitions])
        return {place: committed_offset(each) for place, each in found.items()}

    async def losses(
        self,
        partitions: Collection[int],
        readings: Mapping[int, ChangelogReading],
        committed: Mapping[tuple[str, int], CommittedOffset],
    ) -> list[PartitionLoss]:
        """Compares the records on changelog (none without state) and committed offsets with the topics."""
        places = [(topic, partition) for topic in self._topics for partition in partitions]
        ranges = await self._ask(lambda client: client.ranges(places))
        found = []
        for partition in partitions:
            reading = readings.get(partition)
            own = {topic: committed[topic, partition] for topic in self._sources if (topic, partition) in committed}
            applied = reading.applied if reading is not None and len(self._sources) == 1 else -1
            registered = (self._registered or {}).get(partition, {})
            record = PartitionRecord(own, None if reading is None else reading.sources, applied, registered)
            found += partition_losses(partition, self._sources, self._changelog, record, self._identities, ranges)
        return found

    def id_records(self, partitions: Collection[int]) -> list[Produce]:
        """Returns the records of the present ids for tentalis.topic-ids.v1, of the partitions where it has others; from
        now on `losses` compares with them."""
        ids = {topic: self._identities[topic].topic_id for topic in self._topics}
        if self._registered is None:
            return []
        lacking = [partition for partition in partitions if self._registered.get(partition) != ids]
        self._registered |= dict.fromkeys(lacking, ids)
        return [
            Produce(
                topics.TOPIC_IDS,
                topic_ids.partition_key(self._application, partition).encode(),
                topic_ids.encoded(ids),
            )
            for partition in lacking
        ]

    def lacks_sources(self, reading: ChangelogReading) -> bool:
        """True if the changelog partition must get a record of the inputs."""
        return reading.sources != self.source_ids

    async def check_running(self) -> bool:
        """Compares the topics with the last `look`. Returns False if that must be tried again: the broker did not
        answer, or does not find a topic for the first time. Topics that this principal may no longer describe are not
        compared: the read or write that is denied too names the ACL. Raises TopicLost, PartitionsChanged."""
        if not self._identities:
            return True
        try:
            found = await self._ask(lambda client: client.identities(self._identities.keys()))
        except Forbidden as error:
            log.warning("the topics are not compared with what they were: %s", error)
            return True
        except KafkaException as error:
            log.warning("the ids of the topics are not available: %s", error.args[0].str())
            return False
        if found.keys() < self._identities.keys():
            self._missed += 1
            if self._missed < LOOKS_BEFORE_GONE:
                return False
        else:
            self._missed = 0
        check_changes(self._identities, found, WAYS_ON)
        return True

    async def _read_registered(self) -> dict[int, Mapping[str, str]] | None:
        there = await self._ask(lambda client: client.identities([topics.TOPIC_IDS]))
        if not there:
            log.warning(
                "there is no topic %s: this application would not notice that its inputs and its changelog were "
                "deleted together. `tentalis topics apply` creates it",
                topics.TOPIC_IDS,
            )
            return None
        records = await asyncio.to_thread(read_topic_ids, self._settings)
        if records.all_topics is None:
            log.warning(
                "%s has no record of all topics: it is new, or it was lost. The records of this application are "
                "written anew; `tentalis topics apply` writes the others",
                topics.TOPIC_IDS,
            )
        return records.of(self._application)

    @property
    def _topics(self) -> tuple[str, ...]:
        return self._sources if self._changelog is None else (*self._sources, self._changelog)

    async def _ask(self, ask: Callable[[TopicClient], T]) -> T:
        """Asks in a thread; retries transient errors. Raises KafkaException."""
        if self._client is None:
            self._client = TopicClient(self._settings)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(ask, self._client)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not (cause.retriable() or cause.code() in ELECTING) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_S)


WAYS_ON = (
    "What to do: restore the topic from a backup or, for a run, its rollouts with `tentalis import` from an export; "
    "rebuild the changelog of the join with `tentalis state rebuild join`; or start once with --accept-loss, which "
    "continues without the records and writes what is given up to tentalis.outcomes.v1 and tentalis.audit.v1 "
    "(docs/operations/lost-topics.md)"
)
