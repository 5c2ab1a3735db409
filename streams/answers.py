"""What the outside has answered to the batch under way, so that a batch tried again asks only for what is missing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streams.intake import together
from streams.processor import LogRecord, Retryable

K = TypeVar("K")
V = TypeVar("V")

IN_A_ROW = 8
"""Failures without an answer in between after which the rest of a batch is not asked: the outside is away."""


@dataclass(slots=True)
class _Batch(Generic[K, V]):
    topic: str
    first: int
    last: int
    answers: dict[K, V] = field(default_factory=dict)

    def holds(self, records: Sequence[LogRecord]) -> bool:
        return records[0].topic == self.topic and self.first <= records[0].offset and records[-1].offset <= self.last


class Turns(AbstractAsyncContextManager[None]):
    """A call's turn to be made: waits for a slot. Raises Retryable once the batch is given up."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self.failed = 0
        """Failures since the last answer."""

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        if self.failed >= IN_A_ROW:
            self._slots.release()
            raise Retryable(f"not asked: {self.failed} calls in a row have failed")

    async def __aexit__(self, *raised: object) -> None:
        self._slots.release()


class Answers(Generic[K, V]):
    """Answers by partition. Of each, those of one batch are held, from the first call until the batch is processed.

    Args:
        at_once: most calls in flight, over all partitions.
    """

    def __init__(self, at_once: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._batches: dict[int, _Batch[K, V]] = {}
        self._given_up: set[int] = set()
        self.asking: set[int] = set()
        """Partitions with calls that are not over, or wait for a slot."""

    @contextmanager
    def batch(self, partition: int, records: Sequence[LogRecord]) -> Iterator[None]:
        """Around the processing of a batch, also of one that is tried again, as a whole or record by record."""
        self._given_up.discard(partition)
        held = self._batches.get(partition)
        if held is None or not held.holds(records):
            held = self._batches[partition] = _Batch(records[0].topic, records[0].offset, records[-1].offset)
        try:
            yield
        except Exception:
            self._given_up.add(partition)
            raise
        if records[-1].offset == held.last:
            del self._batches[partition]

    def revoke(self, partition: int) -> None:
        """Forgets the answers for a partition, unless it is revoked only to try a failed batch again."""
        if partition in self._given_up:
            self._given_up.discard(partition)
        else:
            self._batches.pop(partition, None)

    async def ask(self, partition: int, questions: Sequence[tuple[K, Callable[[Turns], Awaitable[V]]]]) -> list[V]:
        """The answers in order; each question is asked unless its answer is held. Within `batch`.

        A failure does not cut the other calls short: what they answer is held for the next try.

        Args:
            questions: key and call; the call does what takes a slot within the turns that it is given.

        Raises:
            Exception: the first failure, one that is not Retryable before one that is.
        """
        answers, turns = self._batches[partition].answers, Turns(self._slots)
        failures: list[Exception] = []

        async def asked(key: K, call: Callable[[Turns], Awaitable[V]]) -> None:
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
