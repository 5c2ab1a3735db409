"""Which records one answer of the reader holds, and where it jumps."""

import asyncio
from typing import Any

import pytest
from confluent_kafka import KafkaError

from streams import log_reader
from streams.log_reader import NEAR, KafkaLogReader
from streams.processor import Retryable
from tentalis.config import Settings


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


class End:
    def error(self) -> KafkaError:
        return KafkaError(KafkaError._PARTITION_EOF)


class OnePartition:
    """A consumer of one partition that holds these records."""

    def __init__(self, records: dict[int, bytes]) -> None:
        self._records = records
        self._position = 0
        self.jumps: list[int] = []

    def assign(self, places: list[Any]) -> None:
        self._position = places[0].offset
        self.jumps.append(self._position)

    def unassign(self) -> None:
        """Nothing is fetched ahead."""

    def poll(self, timeout: float) -> Message | End:
        later = [offset for offset in sorted(self._records) if offset >= self._position]
        if not later:
            return End()
        self._position = later[0] + 1
        return Message(later[0], self._records[later[0]])


def reader_of(records: dict[int, bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[KafkaLogReader, OnePartition]:
    reader, consumer = KafkaLogReader(Settings()), OnePartition(records)
    monkeypatch.setattr(reader, "_connected", lambda: consumer)
    return reader, consumer


def test_near_records_are_read_in_one_go_and_what_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    far = 7 + NEAR
    reader, consumer = reader_of({offset: b"v" for offset in (0, 1, 4, 5, far)}, monkeypatch)
    found = asyncio.run(reader.read("t", 0, [5, 0, 2, 3, far, far + 1]))
    there = {offset: record.offset for offset, record in found.items() if record is not None}
    assert there == {offset: offset for offset in (0, 5, far)}
    assert list(found) == [0, 2, 3, 5, far, far + 1]
    assert consumer.jumps == [0, far]


def test_an_answer_is_bounded_in_bytes_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MOST_BYTES", 10)
    reader, _ = reader_of({offset: b"12345" for offset in range(6)} | {6: bytes(99)}, monkeypatch)
    assert list(asyncio.run(reader.read("t", 0, range(7)))) == [0, 1, 2]
    assert list(asyncio.run(reader.read("t", 0, [6]))) == [6]


class Silent(OnePartition):
    """As librdkafka can be for minutes once a broker was away."""

    closed = False

    def poll(self, timeout: float) -> None:  # type: ignore[override]
        return None

    def close(self) -> None:
        self.closed = True


def test_a_consumer_that_stays_silent_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, other = Silent({}), OnePartition({0: b"v"})
    consumers: list[OnePartition] = [silent, other]
    reader = KafkaLogReader(Settings())
    monkeypatch.setattr(reader, "_connected", lambda: consumers.pop(0))
    monkeypatch.setattr(log_reader, "PATIENCE_S", 0.01)
    with pytest.raises(Retryable, match="nothing at offset 0"):
        asyncio.run(reader.read("t", 0, [0]))
    assert list(asyncio.run(reader.read("t", 0, [0]))) == [0] and silent.closed
