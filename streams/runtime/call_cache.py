"""Caches external calls of the current batch, so that a retry repeats only the failed ones."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streams.runtime.decoding import together
from streams.runtime.processor import LogRecord, Retryable

K = TypeVar("K")
V = TypeVar("V")

IN_A_ROW = 8
"""Consecutive failures after which the remaining calls of a batch are not made: the service counts as unavailable."""


@dataclass(slots=True)
class _CachedBatch(Generic[K, V]):
    topic: str
    first: int
    last: int
    answers: dict[K, V] = field(default_factory=dict)

    def holds(self, records: Sequence[LogRecord]) -> bool:
        return records[0].topic == self.topic and self.first <= records[0].offset and records[-1].offset <= self.last


class CallSlots(AbstractAsyncContextManager[None]):
    """Limits the calls in flight: entering waits for a slot. Raises Retryable once the batch is given up."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self.failed = 0
        """Failures since the last answered call."""

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        if self.failed >= IN_A_ROW:
            self._slots.release()
            raise Retryable(f"no further call is made now: {self.failed} calls in a row have failed")

    async def __aexit__(self, *raised: object) -> None:
        self._slots.release()


class CallCache(Generic[K, V]):
    """Answered calls by partition. The answers of one batch are held, from its first call until it is processed.

    Args:
        at_once: the most calls in flight, over all partitions.
    """

    def __init__(self, at_once: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._batches: dict[int, _CachedBatch[K, V]] = {}
        self._given_up: set[int] = set()
        self.asking: set[int] = set()
        """Partitions with calls that are unfinished or wait for a slot."""

    @contextmanager
    def batch(self, partition: int, records: Sequence[LogRecord]) -> Iterator[None]:
        """Encloses the processing of a batch, including a retry of the whole batch or record by record."""
        self._given_up.discard(partition)
        held = self._batches.get(partition)
        if held is None or not held.holds(records):
            held = self._batches[partition] = _CachedBatch(records[0].topic, records[0].offset, records[-1].offset)
        try:
            yield
        except Exception:
            self._given_up.add(partition)
            raise
        if records[-1].offset == held.last:
            del self._batches[partition]

    def revoke(self, partition: int) -> None:
        """Drops the answers of a partition, unless it is revoked only to retry a failed batch."""
        if partition in self._given_up:
            self._given_up.discard(partition)
        else:
            self._batches.pop(partition, None)

    async def ask(self, partition: int, questions: Sequence[tuple[K, Callable[[CallSlots], Awaitable[V]]]]) -> list[V]:
        """Returns the answers in order; makes the calls whose answers are not held. Call it within `batch`.

        A failure does not cancel the other calls: their answers are held for the next try.

        Args:
            questions: key and call; the call enters the turns that it is given for the work that takes a slot.

        Raises:
            Exception: the first failure; one that is not Retryable takes precedence.
        """
        answers, turns = self._batches[partition].answers, CallSlots(self._slots)
        failures: list[Exception] = []

        async def asked(key: K, call: Callable[[CallSlots], Awaitable[V]]) -> None:
            try:
                answers[key] = await call(turns)
                turns.failed = 0
            except Exception as error:  # noqa: BLE001 - raised below, when the others are done
                turns.failed += 1
                failures.append(error)

        missing = {key: call for key, call in questions if key not in answers}
        if missing:
            self.asking.add(partition)
            try:
                await together([asked(key, call) for key, call in missing.items()])
            finally:
                self.asking.discard(partition)
        if failures:
            raise min(failures, key=lambda error: isinstance(error, Retryable))
        return [answers[key] for key, _ in questions]
