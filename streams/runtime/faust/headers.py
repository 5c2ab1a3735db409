"""Lets aiokafka read records with header names that are not UTF-8, which the broker accepts.

aiokafka raises when it decodes such a name and never gets past that record: one record would block every application on
its topic, also after a restart. Here the batch is read again in Python with the bytes of such names escaped (`\\xff`),
and the application processes the record like any other.
"""

# mypy: disable-error-code="misc"
# aiokafka has no usable type annotations.

from collections.abc import Iterator
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords, _MemoryRecordsPy


class _Spelling(bytearray):
    """A buffer whose slices decode any bytes, with those that are not UTF-8 escaped."""

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        return _Spelling(found) if isinstance(item, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return super().decode(encoding, "backslashreplace")


class _SpellingBatch(_DefaultRecordBatchPy):
    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Spelling(self._buffer)


class _BatchWithHeaders:
    """aiokafka's batch, iterated again with escaped header names if one of them cannot be decoded."""

    def __init__(self, batch: Any, data: bytes, index: int) -> None:
        self._batch, self._data, self._index = batch, data, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        done = 0
        try:
            for record in self._batch:
                yield record
                done += 1
        except (UnicodeDecodeError, CorruptRecordException) as error:
            if not isinstance(error, UnicodeDecodeError) and "UnicodeDecodeError" not in str(error):
                raise
        else:
            return
        for number, record in enumerate(self._again()):
            if number >= done:
                yield record

    def _again(self) -> Iterator[Any]:
        records = _MemoryRecordsPy(self._data)
        for _ in range(self._index):
            records.next_batch()
        yield from _SpellingBatch(bytearray(records._next_slice))


class TolerantRecords:
    """Replaces aiokafka's MemoryRecords."""

    def __init__(self, data: bytes) -> None:
        self._records, self._data, self._index = MemoryRecords(data), data, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        batch = self._records.next_batch()
        self._index += 1
        return None if batch is None else _BatchWithHeaders(batch, self._data, self._index - 1)


def install() -> None:
    """Makes all aiokafka consumers of this process read such records. Idempotent."""
    fetcher.MemoryRecords = TolerantRecords
