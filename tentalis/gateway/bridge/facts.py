"""Where the newest records of some topics lie, by key and by event id. Pure.

Nothing of a record is kept but where it is: who needs its content reads it again there. So what this takes is bounded
by count and age, whatever people send.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b

LONGEST_ID = 1024


@dataclass(frozen=True, slots=True)
class Fact:
    """A record: where it lies, when it was appended (ms), and its event id ("" where its headers name none)."""

    topic: str
    partition: int
    offset: int
    appended: int
    event_id: str = ""


def short(topic: str, name: str | bytes) -> bytes:
    """16 bytes that stand for a key or an id of a topic."""
    return blake2b(topic.encode() + b"\0" + (name.encode() if isinstance(name, str) else name), digest_size=16).digest()


class Facts:
    """Of a key the records in the order of the log, of an event id the first of them.

    Args:
        most: facts kept; the oldest go.
        horizon_ms: age from which a fact goes.
    """

    def __init__(self, most: int, horizon_ms: int) -> None:
        self._most, self.horizon_ms = most, horizon_ms
        self._by_key: dict[bytes, deque[Fact]] = {}
        self._by_id: dict[bytes, Fact] = {}
        self._order: OrderedDict[tuple[str, int, int], tuple[bytes, Fact]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, fact: Fact, key: bytes, now_ms: int) -> bool:
        """Takes in a record; False for one that is known."""
        place = (fact.topic, fact.partition, fact.offset)
        if place in self._order:
            return False
        name = short(fact.topic, key)
        self._order[place] = name, fact
        _insert(self._by_key.setdefault(name, deque()), fact)
        if 0 < len(fact.event_id) <= LONGEST_ID:
            event = short(fact.topic, fact.event_id)
            first = self._by_id.setdefault(event, fact)
            if fact.partition == first.partition and fact.offset < first.offset:
                self._by_id[event] = fact
        self._expire(now_ms)
        return True

    def of_key(self, topic: str, key: str) -> list[Fact]:
        """The records under a key, the oldest first."""
        return list(self._by_key.get(short(topic, key), ()))

    def of_id(self, topic: str, event_id: str) -> Fact | None:
        """The first record with an event id."""
        return self._by_id.get(short(topic, event_id))

    def _expire(self, now_ms: int) -> None:
        while self._order:
            place, (name, fact) = next(iter(self._order.items()))
            if len(self._order) <= self._most and fact.appended >= now_ms - self.horizon_ms:
                return
            del self._order[place]
            known = self._by_key[name]
            known.remove(fact)
            if not known:
                del self._by_key[name]
            event = short(fact.topic, fact.event_id)
            if self._by_id.get(event) == fact:
                del self._by_id[event]


def _insert(known: deque[Fact], fact: Fact) -> None:
    # A record of our own is known when it is acknowledged, perhaps before one that lies in front of it was read.
    at = len(known)
    while at and known[at - 1].offset > fact.offset:
        at -= 1
    known.insert(at, fact)
