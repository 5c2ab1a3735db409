"""Offset index of the newest records of some topics, by key and by event id. Pure.

It keeps only the place of each record; its content is read again from the log. So count and age bound the memory,
whatever the size of the records.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b

MAX_ID_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class IndexedRecord:
    """Reference to a record: its place on the log, append time (ms), and event id ("" if its headers name none)."""

    topic: str
    partition: int
    offset: int
    appended_at: int
    event_id: str = ""


def hash_key(topic: str, key: str | bytes) -> bytes:
    """A 16-byte hash of a topic's key or id."""
    return blake2b(topic.encode() + b"\0" + (key.encode() if isinstance(key, str) else key), digest_size=16).digest()


class OffsetIndex:
    """The offset index: the records of a key in log order, and the first record of an event id.

    Args:
        max_records: maximum number of entries; the oldest are removed first.
        horizon_ms: maximum age of an entry.
    """

    def __init__(self, max_records: int, horizon_ms: int) -> None:
        self._max_records, self.horizon_ms = max_records, horizon_ms
        self._by_key: dict[bytes, deque[IndexedRecord]] = {}
        self._by_id: dict[bytes, IndexedRecord] = {}
        self._order: OrderedDict[tuple[str, int, int], tuple[bytes, IndexedRecord]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, ref: IndexedRecord, key: bytes, now_ms: int) -> bool:
        """Adds a record; returns False if it is known already."""
        position = (ref.topic, ref.partition, ref.offset)
        if position in self._order:
            return False
        key_hash = hash_key(ref.topic, key)
        self._order[position] = key_hash, ref
        _insert(self._by_key.setdefault(key_hash, deque()), ref)
        if 0 < len(ref.event_id) <= MAX_ID_LENGTH:
            id_hash = hash_key(ref.topic, ref.event_id)
            first = self._by_id.setdefault(id_hash, ref)
            if ref.partition == first.partition and ref.offset < first.offset:
                self._by_id[id_hash] = ref
        self._expire(now_ms)
        return True

    def by_key(self, topic: str, key: str) -> list[IndexedRecord]:
        """The records of a key, oldest first."""
        return list(self._by_key.get(hash_key(topic, key), ()))

    def by_id(self, topic: str, event_id: str) -> IndexedRecord | None:
        """The first record with an event id."""
        return self._by_id.get(hash_key(topic, event_id))

    def _expire(self, now_ms: int) -> None:
        while self._order:
            position, (key_hash, ref) = next(iter(self._order.items()))
            if len(self._order) <= self._max_records and ref.appended_at >= now_ms - self.horizon_ms:
                return
            del self._order[position]
            refs = self._by_key[key_hash]
            refs.remove(ref)
            if not refs:
                del self._by_key[key_hash]
            id_hash = hash_key(ref.topic, ref.event_id)
            if self._by_id.get(id_hash) == ref:
                del self._by_id[id_hash]


def _insert(refs: deque[IndexedRecord], ref: IndexedRecord) -> None:
    # A record written here is added when it is acknowledged, perhaps before a preceding record has been read.
    index = len(refs)
    while index and refs[index - 1].offset > ref.offset:
        index -= 1
    refs.insert(index, ref)
