"""Ticks are sent when a wait is over, and rarely otherwise."""

import asyncio

from schemas import topics
from schemas.records import Record
from streams.apps.join.processor import JoinProcessor
from streams.fold.clock import BEGINNING
from streams.fold.tick_schedule import STILL_S, TickSchedule
from streams.fold.timers import NEVER
from streams.runtime.processor import LogRecord
from tests.support.join_support import CODEC, LIMITS, PARTITION, START, head, open_, sample, score


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def due_at(schedule: TickSchedule, clock: Clock, seconds: int, time_ms: int, earliest: int) -> list[int]:
    """The seconds, of the next ones, at which a tick is due while stream time stands still."""
    found = []
    for second in range(1, seconds + 1):
        clock.now += 1
        if schedule.due(PARTITION, time_ms, earliest):
            found.append(second)
    return found


def test_nothing_waits_a_tick_now_and_then() -> None:
    clock = Clock()
    schedule = TickSchedule(clock)
    assert schedule.due(PARTITION, BEGINNING, NEVER), "nobody knows how long the partition had no owner"
    assert due_at(schedule, clock, 2 * int(STILL_S), BEGINNING, NEVER) == [STILL_S, 2 * STILL_S]


def test_records_replace_ticks() -> None:
    clock = Clock()
    schedule = TickSchedule(clock)
    schedule.due(PARTITION, 0, NEVER)
    for at in range(1, 200):
        clock.now += 1
        assert not schedule.due(PARTITION, at * 1000, NEVER)


def test_a_tick_is_due_when_its_append_time_will_be_after_the_end_of_the_wait() -> None:
    clock = Clock()
    schedule = TickSchedule(clock)
    schedule.due(PARTITION, 5_000, NEVER)
    # At the end itself a record is still in time.
    assert due_at(schedule, clock, 4, 5_000, 8_000) == [4]


def test_a_tick_that_ends_no_wait_is_repeated() -> None:
    clock = Clock()
    schedule = TickSchedule(clock)
    schedule.due(PARTITION, 5_000, NEVER)
    assert due_at(schedule, clock, 6, 5_000, 7_500) == [3, 4, 5, 6], "the broker's clock was set back"


def test_a_partition_that_comes_back_gets_a_tick_at_once() -> None:
    clock = Clock()
    schedule = TickSchedule(clock)
    assert schedule.due(PARTITION, 0, NEVER) and not schedule.due(PARTITION, 0, NEVER)
    schedule.forget(PARTITION)
    assert schedule.due(PARTITION, 0, NEVER) and schedule.due(PARTITION + 1, 0, NEVER)


def test_the_join_gives_up_waits_in_time_and_is_silent_otherwise() -> None:
    """A broker and a worker's beat, second by second, for five minutes: a hint and a group do not come."""
    clock, offsets, appended = Clock(), iter(range(10_000)), list[int]()
    join = JoinProcessor(CODEC, LIMITS, clock=clock)
    join.restore(PARTITION, {})
    began, skew_ms = clock.now, -86_400_000  # the broker's clock is a day behind, which nobody here may know

    def append(event: Record) -> LogRecord:
        at = START + skew_ms + int((clock.now - began) * 1000)
        return LogRecord(topics.HALVES, PARTITION, next(offsets), at, event.key, CODEC.encode(topics.HALVES, event))

    def log_time() -> int:
        return START + skew_ms + int((clock.now - began) * 1000)

    waits = {"deadline_ms": 2_500, "opd_window_ms": 1_200}
    given_up = dict[str, float]()
    for second in range(300):
        events: list[Record] = []
        if second == 100:
            events = [open_(head("group", n=2, **waits), at=log_time())]
        if second == 200:
            events = [score(sample(head("alone", **waits)), at=log_time())]
        records = [append(event) for event in events]
        for tick in join.ticks([PARTITION]):
            appended.append(second)
            event = CODEC.decode(tick.value, topic=topics.HALVES, partition=PARTITION, offset=0)
            records.append(append(event))
        outputs = asyncio.run(join.process(PARTITION, records)).outputs if records else []
        given_up |= {output.key: second for output in outputs if output.topic == topics.OUTCOMES}
        clock.now += 1
    assert given_up == {"group/0": 103, "group/1": 103, "alone/0": 202}
    # One at the start, one for each wait, and one for each half minute without a record.
    assert len(appended) <= 1 + 2 + 300 // STILL_S
