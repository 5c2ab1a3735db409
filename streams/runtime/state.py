"""Keyed state of the owned partitions, and the format and reading of its changelog.

A changelog record is (key, value) with the applied offset in the first 8 bytes of the value; a deletion has no value,
and its offset is in the header `offset`. Reading keeps per key the record with the **greatest offset**, not the one
written last: a worker that was frozen, replaced and woken may still flush an older value after its successor's."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from schemas.place import RecordPlace
from schemas.topics import CHANGELOG_MAX_LAG_MS, CHANGELOG_MIN_LAG_MS, OVERHEAD_BYTES, changelog
from streams.runtime.processor import Change, applied_offset
from tentalis.service.lifecycle import Unmendable

OFFSET_HEADER = "offset"
STALLED_AFTER_S = 60.0


class ChangelogError(Exception):
    """A changelog that cannot be read at present."""


class ForeignRecord(Unmendable):
    """A changelog record that the application did not write. A restart does not help: it reads the record again."""


class Entry(NamedTuple):
    """One changelog record: `value` None is a deletion at `offset`."""

    key: str
    value: bytes | None
    offset: int


class WrittenByAnother(Exception):
    """Another writer's records on an owned changelog partition, which must be read back."""


class Ends:
    """The end offset of each owned changelog partition, to detect writes of others. Only the owner may write there.

    A predecessor that was frozen in the middle of a flush and woke up late may write once. Its record would be after
    the newer one of the same key, and compaction would keep it, unless the owner reads it and writes the newer one
    again.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def begin(self, partition: int, end: int) -> None:
        """Notes that a partition was read back up to `end`, exclusive."""
        self._ends[partition] = end

    def of(self, partition: int) -> int:
        """The end offset of a partition, 0 if unknown."""
        return self._ends.get(partition, 0)

    def wrote(self, topic: str, partition: int, count: int, last: int) -> None:
        """Notes that `count` records were confirmed, the last of them at offset `last`.

        Raises WrittenByAnother if other records are before or between them.
        """
        end = self._ends.get(partition)
        self._ends[partition] = last + 1
        if end is not None and last - count + 1 != end:
            raise WrittenByAnother(
                f"{topic}[{partition}] ended at offset {end}; {count} records were written there, and now it ends at "
                f"{last + 1}: another process wrote to it, such as a predecessor that was frozen and woke up late (or "
                "the broker wrote a record twice). A restart reads it back and repairs it"
            )


class ObservedEntries(Mapping[str, bytes]):
    """A read-only view of entries that calls `read` for each entry when it is iterated."""

    def __init__(self, entries: Mapping[str, bytes], read: Callable[[], None]) -> None:
        self._entries, self._read = entries, read

    def __getitem__(self, key: str) -> bytes:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        for key in self._entries:
            self._read()
            yield key

    def __len__(self) -> int:
        return len(self._entries)


class StateStore:
    """The confirmed state in memory, per owned partition. `rocksdb_store.DiskStore` is its counterpart on disk."""

    def __init__(self) -> None:
        self._partitions: dict[int, dict[str, bytes]] = {}

    def open(self, partition: int, *, anew: bool = False) -> "ChangelogFold":
        """Starts reading a partition's changelog, from the beginning."""
        return ChangelogFold()

    def load(self, partition: int, entries: dict[str, bytes]) -> None:
        """Replaces the state of a partition."""
        self._partitions[partition] = entries

    def drop(self, partition: int) -> None:
        """Drops the state of a revoked partition."""
        self._partitions.pop(partition, None)

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition's entries. While it is iterated, it calls `read` for each entry."""
        state = self._partitions.get(partition, {})
        return MappingProxyType(state) if read is None else ObservedEntries(state, read)

    def apply(self, partition: int, entries: Sequence[Entry], last: int = -1) -> None:
        """Applies confirmed changes; their changelog offset `last` is not used."""
        state = self._partitions.setdefault(partition, {})
        for entry in entries:
            if entry.value is None:
                state.pop(entry.key, None)
            else:
                state[entry.key] = entry.value

    def wrote_sources(self, partition: int, value: bytes, last: int) -> None:
        """Does nothing: every start reads the whole changelog."""

    def distrust(self, partition: int) -> None:
        """Does nothing: every start reads the whole changelog."""

    def size(self) -> int:
        """Bytes on disk: always 0."""
        return 0

    def memory(self) -> int:
        """Bytes that databases hold in memory: always 0."""
        return 0

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


def as_entries(changes: Sequence[Sequence[Change]], current: Mapping[str, bytes], first_offset: int) -> list[Entry]:
    """The changelog records of the changes of one batch, wave after wave.

    A value contains its offset. A deletion is stamped with the lowest offset that still wins over the deleted value:
    the offset of the batch's first record, or that of the key's value if it is greater (a redelivered batch meets its
    own later values). With a higher stamp, such as the batch's last offset, a late zombie could delete a value that
    comes after it in log order.

    Raises:
        ValueError: a value is too short to have an applied offset.
    """
    latest: dict[str, int] = {}
    entries = []
    for key, value in chain.from_iterable(changes):
        if value is not None:
            offset = applied_offset(value)
        else:
            before = latest.get(key)
            if before is None and (held := current.get(key)) is not None:
                before = applied_offset(held)
            offset = first_offset if before is None else max(first_offset, before)
        latest[key] = offset
        entries.append(Entry(key, value, offset))
    return entries


class ChangelogFold:
    """Reads one changelog partition back: keeps per key the entry with the greatest offset, the later one among equals.

    Args:
        known: entries known from an earlier part of the changelog.
    """

    def __init__(self, known: Mapping[str, Entry] = MappingProxyType({})) -> None:
        self.position = 0
        """The changelog offset to read from."""
        self._known = known
        self._best: dict[str, Entry] = dict(known)
        self.stale: set[str] = set()
        """Keys whose last record on the log is not the winning one."""
        self.read = 0
        self.sources: bytes | None = None
        """The changelog's record of the inputs (`streams.runtime.topic_guard`)."""

    def add(self, entry: Entry) -> None:
        """Takes the next record of the changelog, in log order."""
        self.read += 1
        best = self._best.get(entry.key)
        if best is None or entry.offset >= best.offset:
            self._best[entry.key] = entry
            self.stale.discard(entry.key)
        else:
            self.stale.add(entry.key)

    def settle(self, position: int) -> None:
        """Notes that everything before `position` was added."""
        self.position = position

    def restart(self) -> None:
        """Drops everything that was added: the state was given up here."""
        self._best.clear()
        self.stale.clear()

    def changed(self) -> list[Entry]:
        """The recovered entries that are not among the `known` ones."""
        return [entry for key, entry in self._best.items() if entry is not self._known.get(key)]

    def state(self) -> dict[str, bytes]:
        """The recovered state."""
        return {key: entry.value for key, entry in self._best.items() if entry.value is not None}

    def overwritten(self) -> list[Entry]:
        """The recovered entries whose key has a later, stale entry on the log. They must be written again, or
        compaction would keep the stale entries."""
        return [self._best[key] for key in sorted(self.stale)]


def entry_of(topic: str, partition: int, position: int, key: bytes | None, value: bytes | None, headers: Any) -> Entry:
    """The entry of a changelog record. Raises ForeignRecord with the record's topic, partition and offset."""
    where = RecordPlace(topic, partition, position)
    what_next = (
        f"another program wrote to the application's changelog. Stop all its workers, delete {topic}, create it again "
        "with `tentalis topics apply`, and reset the consumer group to the beginning of its topics, to process them "
        "again. To erase live state, write a Forget record, never to the changelog"
    )
    if key is None:
        raise ForeignRecord(f"{where} has no key: {what_next}")
    name = key.decode("utf-8", "surrogateescape")
    try:
        if value is not None:
            return Entry(name, value, applied_offset(value))
        return Entry(name, None, int(dict(headers)[OFFSET_HEADER]))
    except (KeyError, ValueError) as error:
        raise ForeignRecord(f"{where} (key {name!r}) has no valid applied offset ({error}): {what_next}") from error


class Reading(Protocol):
    """The receiver of a changelog partition's records."""

    @property
    def position(self) -> int:
        """The offset to read from."""

    def add(self, entry: Entry) -> None:
        """Takes the next record, in log order."""

    def settle(self, position: int) -> None:
        """Notes that everything before `position` was added."""


class RestartableReading(Reading, Protocol):
    """A reading that can start over, and that keeps the changelog's record of the inputs."""

    sources: bytes | None

    def restart(self) -> None:
        """Drops everything that was added."""


class ChangelogDiverged(Exception):
    """A state's changelog position that is outside the changelog (now)."""

    def __init__(self, partition: int, reason: str) -> None:
        super().__init__(reason)
        self.partition = partition


async def read_changelog(
    topic: str,
    readings: Mapping[int, Reading],
    client: Mapping[str, Any],
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Reads partitions of a changelog from the position of each reading to their current ends.

    Uses a separate consumer, outside the group and outside Faust's flow control, so no input record can be delivered
    early.

    Args:
        client: settings of aiokafka's consumer: broker addresses and authentication.
        progressed: called after each read.

    Raises:
        ChangelogDiverged: before anything is read.
        ForeignRecord: a record that the application did not write.
        ChangelogError: nothing was read for a minute.
    """
    from aiokafka import AIOKafkaConsumer, TopicPartition

    places = [TopicPartition(topic, partition) for partition in readings]
    if not places:
        return
    consumer = AIOKafkaConsumer(
        **client,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=4 * 2**20,
        fetch_max_wait_ms=100,
    )
    await consumer.start()
    try:
        consumer.assign(places)
        begins, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
        starts = {place: _start(readings[place.partition], place, begins[place], ends[place]) for place in places}
        todo = {place for place in places if starts[place] < ends[place]}
        for place in todo:
            consumer.seek(place, starts[place])
        consumer.pause(*(place for place in places if place not in todo))
        heard = time.monotonic()
        while todo:
            fetched = await consumer.getmany(*todo, timeout_ms=200)
            for place, records in fetched.items():
                fold = readings[place.partition]
                for record in records:
                    fold.add(entry_of(topic, place.partition, record.offset, record.key, record.value, record.headers))
                fold.settle(records[-1].offset + 1)
            if fetched:
                heard = time.monotonic()
                progressed()
            elif time.monotonic() - heard > STALLED_AFTER_S:
                raise ChangelogError(
                    f"{topic}: nothing was read from partitions {sorted(place.partition for place in todo)} for "
                    f"{STALLED_AFTER_S:g} s, before their ends: is the broker up?"
                )
            done = {place for place in todo if await consumer.position(place) >= ends[place]}
            if done:
                consumer.pause(*done)
                todo -= done
            await asyncio.sleep(0)
        for place in places:
            readings[place.partition].settle(ends[place])
    finally:
        await consumer.stop()


def _start(reading: Reading, place: Any, begin: int, end: int) -> int:
    position = reading.position
    if position > end or 0 < position < begin:
        raise ChangelogDiverged(
            place.partition,
            f"the state has position {position}, but {place.topic}[{place.partition}] has offsets {begin}-{end}",
        )
    return max(position, begin)


def ensure_changelog(
    bootstrap: str,
    app_id: str,
    table: str,
    partitions: int,
    *,
    record_limit: int = 16 * 2**20,
    client: Mapping[str, Any] | None = None,
) -> str:
    """Creates the changelog topic of an application's table if it is missing; returns its name.

    Compacted only: a changelog that loses records to retention cannot restore the state. Within `min.compaction.lag.ms`
    a zombie's late flush can still be distinguished from the value that it must not replace.

    Args:
        client: further librdkafka settings (security).
    Raises:
        ValueError: the topic exists with a different number of partitions.
        KafkaException: the broker rejected the request.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap, **(client or {})})
    name = changelog(app_id, table)
    config = {
        "cleanup.policy": "compact",
        "min.compaction.lag.ms": str(CHANGELOG_MIN_LAG_MS),
        "max.compaction.lag.ms": str(CHANGELOG_MAX_LAG_MS),
        "max.message.bytes": str(record_limit + OVERHEAD_BYTES),
    }
    topic = NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config)
    try:
        admin.create_topics([topic])[name].result(30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
        found = len(admin.list_topics(name, timeout=15).topics[name].partitions)
        if found != partitions:
            raise ValueError(
                f"{name} has {found} partitions, but the input topics of {app_id} have {partitions}: a changelog must "
                "have the same partition count. Delete the topic to begin with empty state, or restore the count"
            ) from error
    return name
