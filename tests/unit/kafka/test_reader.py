"""A reader of several topics gives their records in the order of its topics."""

from collections.abc import Callable

import pytest

from schemas import topics
from schemas.records import Tick
from schemas.wire.codec import Codec
from tentalis.kafka import reader
from tentalis.kafka.consumer import Stored
from tentalis.kafka.reader import Reader
from tentalis.service.settings import Settings

CODEC = Codec()


def stored(topic: str, offset: int, partition: int = 0) -> Stored:
    tick = Tick(event_time=1, partition=partition)
    return Stored(topic, partition, offset, 1, tick.key, CODEC.encode(topic, tick), (), tick.key.encode())


def test_records_come_topic_by_topic_in_the_given_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    bad = Stored(topics.SESSIONS, 0, 9, 1, "k", b"no record", (), b"k")
    found = [stored(topics.HALVES, 4), bad, stored(topics.SESSIONS, 7), stored(topics.HALVES, 5)]

    class FoundRecords:
        """A follower that finds these records at once."""

        def __init__(self, settings: Settings, *names: str, wait_ms: int) -> None:
            made.append(names)
            self.poll: Callable[[float], list[Stored]] = lambda _: found

    monkeypatch.setattr(reader, "Follower", FoundRecords)
    made_reader = Reader(Settings(bootstrap="nowhere:1"), [topics.SESSIONS, topics.HALVES], CODEC)
    read = made_reader.poll(0.1)
    assert made == [(topics.SESSIONS, topics.HALVES)], "one consumer reads all topics"
    assert [(each.topic, each.offset) for each, _ in read] == [
        (topics.SESSIONS, 7),
        (topics.HALVES, 4),
        (topics.HALVES, 5),
    ]
    assert made_reader.skipped == 1
