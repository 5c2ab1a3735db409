"""Records with header names that are no UTF-8 are read by the applications."""

import inspect

import pytest
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.memory_records import MemoryRecords

from streams.runtime.faust.headers import TolerantRecords, install


class NoText(str):
    def encode(self, *_: object, **__: object) -> bytes:
        return b"\xff\xfe"


def batch(count: int, bad: tuple[int, ...], compression: int) -> bytes:
    builder = _DefaultRecordBatchBuilderPy(2, compression, 0, -1, -1, -1, 10**6)
    for i in range(count):
        name = NoText("x") if i in bad else "h"
        builder.append(i, timestamp=1, key=b"k", value=b"v%d" % i, headers=[(name, b"1"), ("none", None)])
    return bytes(builder.build())


def read(data: bytes) -> list[tuple[bytes, list[tuple[str, bytes | None]]]]:
    records = TolerantRecords(data)
    found = []
    while records.has_next():
        next_batch = records.next_batch()
        assert next_batch.validate_crc() and not next_batch.is_control_batch
        found += [(record.value, record.headers) for record in next_batch]
    assert records.next_batch() is None
    return found


@pytest.mark.parametrize("compression", [0, 4])
def test_every_record_is_read_once_and_in_order(compression: int) -> None:
    data = batch(2, (), compression) + batch(5, (1, 3), compression) + batch(1, (), compression)
    with pytest.raises(UnicodeDecodeError):  # or aiokafka has learnt it, and the module can go
        records = MemoryRecords(data)
        while records.has_next():
            list(records.next_batch())
    found = read(data)
    assert [value for value, _ in found] == [b"v0", b"v1", b"v0", b"v1", b"v2", b"v3", b"v4", b"v0"]
    names = [headers[0][0] for _, headers in found]
    assert names == ["h", "h", "h", r"\xff\xfe", "h", r"\xff\xfe", "h", "h"]
    assert all(headers[1] == ("none", None) for _, headers in found)


def test_other_damage_is_still_told() -> None:
    data = bytearray(batch(1, (), 0))
    data[-20] = 0x7E
    with pytest.raises(CorruptRecordException):
        list(TolerantRecords(bytes(data)).next_batch())


def test_aiokafka_reads_with_what_is_installed() -> None:
    install()
    assert fetcher.MemoryRecords is TolerantRecords
    assert "records = MemoryRecords(part_data[-1])" in inspect.getsource(fetcher.Fetcher)
