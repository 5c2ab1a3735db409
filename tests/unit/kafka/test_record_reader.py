"""The records of one answer of the reader, its seeks, and its recovery from failures."""

import asyncio
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.runtime.log_reader import KafkaLogReader
from streams.runtime.processor import LogRecord, Retryable
from tentalis.kafka.record_reader import NEAR, RecordReader, Unread
from tentalis.service.settings import Settings


class Message:
    def __init__(self, offset: int, value: bytes | None) -> None:
        self._offset, self._value = offset, value

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 2, 7

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> None:
        return None


class Failure:
    """An event instead of a message."""

    def __init__(self, code: int) -> None:
        self._code = code

    def error(self) -> KafkaError:
        return KafkaError(self._code)


class OnePartition:
    """A consumer of one partition that holds these records. As librdkafka does, it reports the end and an offset before
    `begin` once, and is silent until the next seek."""

    def __init__(self, records: dict[int, bytes], begin: int = 0) -> None:
        self._records, self._begin = records, begin
        self._position: int | None = None
        self.jumps: list[int] = []
        self.closed = False

    def assign(self, places: list[Any]) -> None:
        self._position = places[0].offset
        self.jumps.append(places[0].offset)

    def unassign(self) -> None:
        """Nothing is fetched ahead."""

    def close(self) -> None:
        self.closed = True

    def poll(self, timeout: float) -> Message | Failure | None:
        position, self._position = self._position, None
        if position is None:
            return None
        if position < self._begin:
            return Failure(KafkaError._AUTO_OFFSET_RESET)
        later = [offset for offset in sorted(self._records) if offset >= position]
        if not later:
            return Failure(KafkaError._PARTITION_EOF)
        self._position = later[0] + 1
        return Message(later[0], self._records[later[0]])


def reader_of(monkeypatch: pytest.MonkeyPatch, *consumers: OnePartition, most_bytes: int = 100) -> RecordReader:
    reader, left = RecordReader(Settings(), patience_s=0.01, most_bytes=most_bytes), list(consumers)
    monkeypatch.setattr(reader, "_connected", lambda: left.pop(0))
    return reader


def offsets_of(found: dict[int, Any]) -> dict[int, int]:
    return {offset: message.offset() for offset, message in found.items() if message is not None}


def test_near_records_are_read_in_one_go_and_those_that_are_gone_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    far = 7 + NEAR
    consumer = OnePartition({offset: b"v" for offset in (0, 1, 4, 5, far)})
    found = reader_of(monkeypatch, consumer).read("t", 0, [5, 0, 2, 3, far, far + 1, far + 2, far + 2 * NEAR])
    assert offsets_of(found) == {offset: offset for offset in (0, 5, far)}
    assert list(found) == [0, 2, 3, 5, far, far + 1, far + 2, far + 2 * NEAR]
    assert consumer.jumps == [0, far]


def test_records_before_the_first_one_do_not_keep_the_next_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = OnePartition({8: b"v", 9: b"v"}, begin=7)
    assert offsets_of(reader_of(monkeypatch, consumer).read("t", 0, [5, 6, 8, 9])) == {8: 8, 9: 9}


def test_an_answer_is_bounded_in_bytes_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = OnePartition({offset: b"12345" for offset in range(6)} | {6: bytes(99)})
    reader = reader_of(monkeypatch, consumer, most_bytes=10)
    assert list(reader.read("t", 0, range(7))) == [0, 1, 2]
    assert list(reader.read("t", 0, [6])) == [6]


class Silent(OnePartition):
    """As librdkafka can be for minutes once a broker was away."""

    def poll(self, timeout: float) -> None:
        return None


class Failing(OnePartition):
    """The broker does not permit the read."""

    def assign(self, places: list[Any]) -> None:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.mark.parametrize(
    ("broken", "why"), [(Silent({}), "no record at or after offset 0"), (Failing({}), "authorization")]
)
def test_a_consumer_that_fails_or_stays_silent_is_replaced(
    monkeypatch: pytest.MonkeyPatch, broken: OnePartition, why: str
) -> None:
    reader = reader_of(monkeypatch, broken, OnePartition({0: b"v"}))
    with pytest.raises(Unread, match=rf"(?i)t\[0\] cannot be read again: .*{why}"):
        reader.read("t", 0, [0])
    assert list(reader.read("t", 0, [0])) == [0] and broken.closed


def test_the_streams_read_log_records_and_wait_if_the_log_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = KafkaLogReader(Settings())
    monkeypatch.setattr(reader, "_reader", reader_of(monkeypatch, OnePartition({0: b"v"})))
    found = asyncio.run(reader.read("t", 0, [0, 1]))
    assert found == {0: LogRecord("t", 0, 0, 7, "k", b"v"), 1: None} and asyncio.run(reader.read("t", 0, [])) == {}
    monkeypatch.setattr(reader, "_reader", reader_of(monkeypatch, Silent({})))
    with pytest.raises(Retryable, match="cannot be read again"):
        asyncio.run(reader.read("t", 0, [0]))
