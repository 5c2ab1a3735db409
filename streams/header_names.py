"""Header names that are no UTF-8, which the broker takes and aiokafka does not read.

aiokafka raises where it decodes the name and never gets past that record: one of them would keep every application on
its topic from starting again. Here the batch is read once more in Python, with such names spelt out (`\\xff`), and the
application answers with a dead letter or not as for any other record.
"""

# mypy: disable-error-code="misc"
# aiokafka has no types that could be followed.

from collections.abc import Iterator
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords, _MemoryRecordsPy


class _Spelling(bytearray):
    """A buffer whose parts become text whatever is in them."""

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


class _Batch:
    """aiokafka's batch, iterated again with names spelt out if one of them cannot be decoded."""

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
    """In the place of aiokafka's MemoryRecords."""

    def __init__(self, data: bytes) -> None:
        self._records, self._data, self._index = MemoryRecords(data), data, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        batch = self._records.next_batch()
        self._index += 1
        return None if batch is None else _Batch(batch, self._data, self._index - 1)


def install() -> None:
    """Makes aiokafka's consumers of this process read such records. May be called again."""
    fetcher.MemoryRecords = TolerantRecords
