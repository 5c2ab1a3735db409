"""Records that have a dead letter already are found with few reads of the dead-letter topic."""

from typing import Any

import pytest

from tentalis.dlq import written
from tentalis.dlq.context import SKIPPED, context_headers
from tentalis.dlq.records import RawRecord
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.consumer import Stored
from tentalis.service.settings import Settings

TOPIC = "tentalis.rollouts.v1"


def stored(offset: int, timestamp: int = 5_000_000) -> Stored:
    return Stored(TOPIC, 2, offset, timestamp, "k", b"x", ())


def letter(of: Stored, stage: str = "decode", partition: int = 2) -> RawRecord:
    context: dict[str, Any] = {"error_class": "E", "error": "", "attempts": 1, "version": "1", "failed_at": 0.0}
    headers = context_headers(
        topic=of.topic,
        partition=of.partition,
        offset=of.offset,
        timestamp=of.timestamp,
        group="g",
        stage=stage,
        **context,
    )
    return RawRecord(f"{TOPIC}.dlq", partition, 0, 0, b"k", b"x", headers)


class Topic:
    """The dead-letter topic, and every time from which it was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *letters: RawRecord) -> None:
        self.times: list[int] = []
        self.letters = letters
        monkeypatch.setattr(written, "offsets_at", self.offsets_at)
        monkeypatch.setattr(written, "messages_to_end", lambda *_, **__: self.letters)
        monkeypatch.setattr(written, "raw_of", lambda raw: raw)

    def offsets_at(self, settings: Settings, topic: str, time_ms: int) -> dict[int, int | None]:
        assert topic == f"{TOPIC}.dlq"
        self.times.append(time_ms)
        return {2: 0 if self.letters else None}


def test_a_record_has_a_letter_under_its_place_and_append_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = RawRecord(
        f"{TOPIC}.dlq", 2, 1, 0, b"id", None, (("tentalis.dlq.mark", b"dropped"), ("tentalis.dlq.after", b"-1"))
    )
    Topic(monkeypatch, letter(stored(7)), letter(stored(8), SKIPPED), letter(stored(9), partition=3), mark)
    letters = WrittenLetters(Settings())
    assert [letters.has(stored(offset)) for offset in (6, 7, 8, 9)] == [False, True, True, False]
    assert [letters.skipped(stored(offset)) for offset in (7, 8)] == [False, True]
    assert not letters.has(stored(7, 5_000_001)), "the record of a topic that was made anew"
    assert letters.has_skips(TOPIC, 2) and not letters.has_skips(TOPIC, 3)


def test_a_partition_is_read_once_from_its_first_record_on(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(monkeypatch)
    letters = WrittenLetters(Settings())
    assert not letters.covers(stored(3))
    for offset in range(3, 9):
        assert not letters.has(stored(offset, 5_000_000 + offset))
    assert topic.times == [5_000_003 - written.CLOCKS_MS]
    letters.has(stored(2, 4_000_000))
    assert topic.times[1:] == [4_000_000 - written.CLOCKS_MS], "an earlier record needs earlier letters"
    letters.forget()
    assert not letters.covers(stored(3))
