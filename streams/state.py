"""Keyed state of the owned partitions, and its changelog: what is written there and how it is read back.

A changelog record is (key, value) with the applied offset in the first 8 bytes of the value; a deletion has no value
and says its offset in the header `offset`. Reading back keeps per key the record with the **greatest offset**, never
the one written last: a worker that was stopped, replaced and woken may still flush an older value behind its
successor's."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from schemas.place import Place
from schemas.topics import CHANGELOG_MAX_LAG_MS, CHANGELOG_MIN_LAG_MS, OVERHEAD_BYTES, changelog
from streams.processor import Change, applied_offset
from tentalis.service import Unmendable

OFFSET_HEADER = "offset"
STALLED_AFTER_S = 60.0


class ChangelogError(Exception):
    """A changelog that cannot be read back now."""


class ForeignRecord(Unmendable):
    """A record on a changelog that its application did not write: every start reads it again."""


class Entry(NamedTuple):
    """One changelog record: `value` None is a deletion at `offset`."""

    key: str
    value: bytes | None
    offset: int


class WrittenByAnother(Exception):
    """Records of somebody else on a changelog partition that is ours: it has to be read back."""


class Ends:
    """Where the changelog of each owned partition ends: nobody but its owner writes there.

    A predecessor that was frozen in the middle of a flush and woke up late does, once. Its record would lie behind the
    newer one of the same key, and be what compaction keeps, unless the owner reads it and writes the newer one again.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def begin(self, partition: int, end: int) -> None:
        """A partition was read back up to `end`, exclusive."""
        self._ends[partition] = end

    def wrote(self, topic: str, partition: int, count: int, last: int) -> None:
        """`count` records were confirmed, the last of them at offset `last`.

        Raises WrittenByAnother if others lie before or between them.
        """
        end = self._ends.get(partition)
        self._ends[partition] = last + 1
        if end is not None and last - count + 1 != end:
            raise WrittenByAnother(
                f"{topic}[{partition}] ended at offset {end}; {count} records were written there, and now it ends at "
                f"{last + 1}: somebody else wrote to it, as a predecessor does that was frozen and woke up late (or "
                "the broker wrote something twice). Starting again reads it back, and puts that right"
            )


class Heard(Mapping[str, bytes]):
    """A read-only view of entries that says when one of them is read."""

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
    """What the changelog confirmed, in memory, per owned partition. `streams.disk` has the same on disk."""

    def __init__(self) -> None:
        self._partitions: dict[int, dict[str, bytes]] = {}

    def open(self, partition: int, *, anew: bool = False) -> "Fold":
        """The changelog of a partition is to be read: from the beginning."""
        return Fold()

    def load(self, partition: int, entries: dict[str, bytes]) -> None:
        """Replaces the state of a partition."""
        self._partitions[partition] = entries

    def drop(self, partition: int) -> None:
        """Forgets a partition that is gone."""
        self._partitions.pop(partition, None)

    def entries(self, partition: int, read: Callable[[], None] | None = None) -> Mapping[str, bytes]:
        """A read-only view of a partition; `read` is called for every entry that is gone through in it."""
        state = self._partitions.get(partition, {})
        return MappingProxyType(state) if read is None else Heard(state, read)

    def apply(self, partition: int, entries: Sequence[Entry], last: int = -1) -> None:
        """Takes over confirmed changes; where they lie on the changelog does not matter."""
        state = self._partitions.setdefault(partition, {})
        for entry in entries:
            if entry.value is None:
                state.pop(entry.key, None)
            else:
                state[entry.key] = entry.value

    def distrust(self, partition: int) -> None:
        """Every start reads the changelog anyway."""

    def size(self) -> int:
        """Nothing lies on disk."""
        return 0

    def memory(self) -> int:
        """No database holds anything in memory."""
        return 0

    def close(self) -> None:
        """Nothing to be given back."""


def as_entries(changes: Sequence[Sequence[Change]], current: Mapping[str, bytes], first_offset: int) -> list[Entry]:
    """The changelog records of the changes of one batch, wave after wave.

    A value brings its offset. A deletion is stamped with the lowest offset that still beats what it deletes: that of
    the batch's first record, or of the key's value where that is greater (a redelivered batch meets its own later
    values). Any higher stamp, the batch's last offset for one, would let a late zombie delete a value written after it
    in log order.

    Raises:
        ValueError: a value too short to have an applied offset.
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


class Fold:
    """Reads one changelog partition back: per key the entry of the greatest offset, the later written among equals.

    Args:
        known: what is known from an earlier part of the changelog.
    """

    def __init__(self, known: Mapping[str, Entry] = MappingProxyType({})) -> None:
        self.position = 0
        """From where the changelog has to be read."""
        self._known = known
        self._best: dict[str, Entry] = dict(known)
        self.stale: set[str] = set()
        """Keys whose last record on the log is not the one that won."""
        self.read = 0

    def add(self, entry: Entry) -> None:
        """The next record of the changelog, in log order."""
        self.read += 1
        best = self._best.get(entry.key)
        if best is None or entry.offset >= best.offset:
            self._best[entry.key] = entry
            self.stale.discard(entry.key)
        else:
            self.stale.add(entry.key)

    def settle(self, position: int) -> None:
        """Everything before `position` was added."""
        self.position = position

    def changed(self) -> list[Entry]:
        """The entries that won and were not known before."""
        return [entry for key, entry in self._best.items() if entry is not self._known.get(key)]

    def state(self) -> dict[str, bytes]:
        """The recovered state."""
        return {key: entry.value for key, entry in self._best.items() if entry.value is not None}

    def overwritten(self) -> list[Entry]:
        """Entries that won, but are not the last of their key on the log: compaction would one day keep the stale one,
        so they are to be written again."""
        return [self._best[key] for key in sorted(self.stale)]


def entry_of(topic: str, partition: int, position: int, key: bytes | None, value: bytes | None, headers: Any) -> Entry:
    """The entry of a changelog record. Raises ForeignRecord, naming where it lies."""
    where = Place(topic, partition, position)
    what_next = (
        f"something else than the application wrote to its changelog. Stop all its workers, delete {topic}, make it "
        "anew with `tentalis topics apply`, and reset the group to the beginning of its topics, to fold them again. "
        "Live state is forgotten by a Forget record, never by writing here"
    )
    if key is None:
        raise ForeignRecord(f"{where} has no key: {what_next}")
    name = key.decode("utf-8", "surrogateescape")
    try:
        if value is not None:
            return Entry(name, value, applied_offset(value))
        return Entry(name, None, int(dict(headers)[OFFSET_HEADER]))
    except (KeyError, ValueError) as error:
        raise ForeignRecord(f"{where} (key {name!r}) does not say its applied offset ({error}): {what_next}") from error


class Reading(Protocol):
    """What a changelog partition is read into."""

    @property
    def position(self) -> int:
        """The offset from which on it has to be read."""

    def add(self, entry: Entry) -> None:
        """The next record, in log order."""

    def settle(self, position: int) -> None:
        """Everything before `position` was added."""


class Diverged(Exception):
    """State that was read from a changelog up to where it does not reach (any more)."""

    def __init__(self, partition: int, reason: str) -> None:
        super().__init__(reason)
        self.partition = partition


async def read_changelog(
    topic: str,
    readings: Mapping[int, Reading],
    client: Mapping[str, Any],
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Reads partitions of a changelog from where each reading stands to where they end now.

    A reader of its own, outside the group and outside Faust's flow control, so nothing of the input can be delivered
    early.

    Args:
        client: settings of aiokafka's consumer: where the brokers are and how to authenticate.
        progressed: called whenever something was read.

    Raises:
        Diverged: before anything is read.
        ForeignRecord: a record that no application writes.
        ChangelogError: nothing to be read for a minute.
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
                    f"nothing to be read from {topic} partitions {sorted(place.partition for place in todo)} for "
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
        raise Diverged(
            place.partition, f"reaches to offset {position}, but {place.topic}[{place.partition}] to {begin}-{end}"
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

    Compacted only: a changelog that loses records to time never recovers. `min.compaction.lag.ms` is the time in which
    a zombie's late flush can still be told from the value it must not replace.

    Args:
        client: further librdkafka settings (security).
    Raises:
        ValueError: it exists with another number of partitions.
        KafkaException: the broker refused.
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
                "have as many as they. Delete the topic to begin with empty state, or restore the partition count"
            ) from error
    return name
