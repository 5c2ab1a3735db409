"""Idempotent writes to the log: each record once by its id."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from schemas import topics
from schemas.records import Feedback, Record
from tentalis.gateway.api import mapping
from tentalis.gateway.api.errors import conflict_error
from tentalis.gateway.api.offset_index import IndexedRecord, OffsetIndex
from tentalis.gateway.api.record_log import RecordLog
from tentalis.gateway.http.errors import APIError


class IdempotentWriter:
    """Appends records that are not on the log yet. `on_appended`: called with the place and key of an acknowledged
    record."""

    def __init__(
        self, log: RecordLog, offset_index: OffsetIndex, on_appended: Callable[[IndexedRecord, bytes], None]
    ) -> None:
        self._log, self._offset_index, self._on_appended = log, offset_index, on_appended
        self._locks: dict[tuple[str, str], list[Any]] = {}

    async def append_once(self, topic: str, record: Record) -> None:
        """Appends a record unless it is on the log. Raises APIError: 409 if its id is on the log with other content."""
        async with self.serialised(topic, record.event_id):
            ref = self._offset_index.by_id(topic, record.event_id)
            for _, existing in await self._log.records([] if ref is None else [ref], type(record)):
                if not mapping.same_content(existing, record):
                    raise conflict_error(f"the id {record.event_id} is already used for other content")
                return
            await self.append(topic, record)

    async def append_feedback(self, feedback: Feedback) -> None:
        """Appends feedback; without its result if both exceed the record limit. Scoring pairs them again
        (docs/concepts/feedback.md)."""
        try:
            await self.append_once(topics.FEEDBACK, feedback)
        except APIError as error:
            if error.status != 413 or feedback.result is None:
                raise
            await self.append_once(topics.FEEDBACK, feedback.model_copy(update={"result": None}))

    async def append(self, topic: str, record: Record) -> None:
        """Appends a record. Raises APIError."""
        ref = await self._log.append(topic, record)
        self._on_appended(ref, record.key.encode())

    @asynccontextmanager
    async def serialised(self, topic: str, key: str) -> AsyncIterator[None]:
        """Serialises posts with the same id."""
        entry = self._locks.setdefault((topic, key), [asyncio.Lock(), 0])
        entry[1] += 1
        try:
            async with entry[0]:
                yield
        finally:
            entry[1] -= 1
            if not entry[1]:
                del self._locks[topic, key]
