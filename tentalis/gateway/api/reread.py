"""Reads the records that clients of the bridge ask for again, and decodes them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from schemas import topics
from schemas.records import Record
from schemas.wire.codec import Codec, DecodeError, SchemasUnavailable
from tentalis.gateway.api.offset_index import IndexedRecord
from tentalis.gateway.http.errors import APIError
from tentalis.kafka.record_reader import RecordReader, Unread
from tentalis.service.settings import Settings

R = TypeVar("R", bound=Record)

PATIENCE_S = 5.0
# Of one answer, per partition.
MOST_BYTES = 64 * 2**20
# From an offset before the first one, the reader continues at the first: many old records may be gone at once.
FETCH = {"fetch.wait.max.ms": 50, "auto.offset.reset": "earliest"}
MOST_WAITING = 256


class Reread:
    """One reader on a separate thread; reads are queued and run one at a time."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._codec = codec
        self._reader = RecordReader(settings, FETCH, patience_s=PATIENCE_S, most_bytes=MOST_BYTES)
        # Not the event loop's default threads: recording turns needs those, however many requests read here.
        self._thread = ThreadPoolExecutor(1, "bridge-reread")
        self._waiting = 0

    async def records(self, facts: Sequence[IndexedRecord], kind: type[R]) -> list[tuple[IndexedRecord, R]]:
        """Returns the records of that kind at these places, ordered by topic, partition and offset. Deleted and
        undecodable records are left out. Raises APIError (503)."""
        if not facts:
            return []
        if self._waiting >= MOST_WAITING:
            raise _away(f"{MOST_WAITING} reads are waiting")
        ordered = sorted(facts, key=lambda fact: (fact.topic, fact.partition, fact.offset))
        self._waiting += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._records, ordered)
        finally:
            self._waiting -= 1
        return [(fact, record) for fact, record in found if isinstance(record, kind)]

    def _records(self, facts: list[IndexedRecord]) -> list[tuple[IndexedRecord, Record]]:
        found = []
        for fact, value in self._read(facts):
            expected = topics.table().records_of(fact.topic)
            try:
                record = self._codec.decode(
                    value, topic=fact.topic, partition=fact.partition, offset=fact.offset, expected=expected
                )
            except DecodeError:  # the application that owns the topic dead-letters it
                continue
            except SchemasUnavailable as error:
                raise _away(str(error)) from error
            found.append((fact, record))
        return found

    def _read(self, facts: list[IndexedRecord]) -> list[tuple[IndexedRecord, bytes]]:
        found: list[tuple[IndexedRecord, bytes]] = []
        for (topic, partition), there in groupby(facts, key=lambda fact: (fact.topic, fact.partition)):
            at_offset = {fact.offset: fact for fact in there}
            try:
                messages = self._reader.read(topic, partition, at_offset)
            except Unread as error:
                raise _away(str(error)) from error
            for offset, message in messages.items():
                value = None if message is None else message.value()
                if value is not None:
                    found.append((at_offset[offset], value))
        return found

    def close(self) -> None:
        """Closes the consumer after the running read."""
        self._thread.shutdown(cancel_futures=True)
        self._reader.close()


def _away(why: str) -> APIError:
    return APIError(503, f"the log cannot be read now ({why}): try again", "api_error", retry_after_s=2)
