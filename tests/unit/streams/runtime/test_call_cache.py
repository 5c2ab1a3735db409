"""The cached calls of a batch that is tried again, as a whole or record by record."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from streams.runtime.call_cache import CallCache, CallSlots
from streams.runtime.processor import LogRecord, Retryable


def records(first: int, last: int, topic: str = "in") -> list[LogRecord]:
    return [LogRecord(topic, 3, offset, 0, "k", b"") for offset in range(first, last + 1)]


class Asker:
    """Asks a question for each record; knows which were really asked."""

    def __init__(self) -> None:
        self.answers = CallCache[int, int](2)
        self.asked: list[int] = []
        self.fails: dict[int, Exception] = {}

    def process(self, batch: Sequence[LogRecord], then: Exception | None = None) -> list[int]:
        self.asked.clear()

        def question(offset: int) -> tuple[int, Callable[[CallSlots], Awaitable[int]]]:
            async def call(turns: CallSlots) -> int:
                async with turns:
                    self.asked.append(offset)
                    assert self.answers.asking == {3}
                    await asyncio.sleep(0)
                    if offset in self.fails:
                        raise self.fails[offset]
                    return -offset

            return offset, call

        async def story() -> list[int]:
            with self.answers.batch(3, batch):
                answers = await self.answers.ask(3, [question(record.offset) for record in batch])
                if then is not None:
                    raise then
                return answers

        return asyncio.run(story())


def test_record_by_record_nothing_is_asked_again() -> None:
    asker, batch = Asker(), records(0, 4)
    asker.fails[2] = ValueError("wrong")
    with pytest.raises(ValueError, match="wrong"):
        asker.process(batch)
    asker.answers.revoke(3)  # as the runner does after a failure
    assert asker.asked == [0, 1, 2, 3, 4]
    for record in batch:
        if record.offset == 2:
            with pytest.raises(ValueError, match="wrong"):
                asker.process([record])
            asker.answers.revoke(3)
        else:
            assert asker.process([record]) == [-record.offset]
            assert asker.asked == []
    assert asker.process(batch[:2]) == [0, -1]
    assert asker.asked == [0, 1], "the batch was done"
    assert asker.answers.asking == set()


def test_answers_are_held_while_what_follows_fails() -> None:
    asker, batch = Asker(), records(0, 1)
    with pytest.raises(Retryable):
        asker.process(batch, then=Retryable("the log cannot be read"))
    assert asker.process(batch) == [0, -1] and asker.asked == []


def test_answers_to_a_batch_of_another_topic_are_not_held() -> None:
    asker = Asker()
    with pytest.raises(Retryable):
        asker.process(records(0, 1), then=Retryable("later"))
    assert asker.process(records(0, 1, "other")) == [0, -1] and asker.asked == [0, 1]


def test_permanent_errors_are_raised_first_and_equal_questions_are_asked_once() -> None:
    asker = Asker()
    asker.fails = {0: Retryable("away"), 1: ValueError("wrong")}
    with pytest.raises(ValueError, match="wrong"):
        asker.process(records(0, 1))
    again = records(5, 5) * 3
    assert asker.process(again) == [-5, -5, -5] and asker.asked == [5]
