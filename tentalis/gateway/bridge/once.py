"""Records to the log, each once by its id."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from schemas import topics
from schemas.records import Feedback, Record
from tentalis.gateway.bridge import mapping
from tentalis.gateway.bridge.facts import Fact, Facts
from tentalis.gateway.bridge.ports import TheLog
from tentalis.gateway.bridge.refusals import conflict
from tentalis.gateway.failure import Refused


class Once:
    """Appends what is not on the log. `note` is told where a record lies, and its key, once it is acknowledged."""

    def __init__(self, log: TheLog, facts: Facts, note: Callable[[Fact, bytes], None]) -> None:
        self._log, self._facts, self._note = log, facts, note
        self._locks: dict[tuple[str, str], list[Any]] = {}

    async def put(self, topic: str, record: Record) -> None:
        """Appends a record, unless it is on the log. Raises Refused: 409 if another of its id is."""
        async with self.alone(topic, record.event_id):
            fact = self._facts.of_id(topic, record.event_id)
            for _, before in await self._log.records([] if fact is None else [fact], type(record)):
                if not mapping.same(before, record):
                    raise conflict(f"the id {record.event_id} stands for something else already")
                return
            await self.append(topic, record)

    async def say(self, feedback: Feedback) -> None:
        """Feedback that does not fit with its result goes without it: it is paired with it again (docs/feedback.md)."""
        try:
            await self.put(topics.FEEDBACK, feedback)
        except Refused as error:
            if error.status != 413 or feedback.result is None:
                raise
            await self.put(topics.FEEDBACK, feedback.model_copy(update={"result": None}))

    async def append(self, topic: str, record: Record) -> None:
        """Appends a record. Raises Refused."""
        fact = await self._log.append(topic, record)
        self._note(fact, record.key.encode())

    @asynccontextmanager
    async def alone(self, topic: str, name: str) -> AsyncIterator[None]:
        """One post of an id at a time."""
        entry = self._locks.setdefault((topic, name), [asyncio.Lock(), 0])
        entry[1] += 1
        try:
            async with entry[0]:
                yield
        finally:
            entry[1] -= 1
            if not entry[1]:
                del self._locks[topic, name]
