"""Pairing under every cut: whatever the order of reading, the batches, the kills, the workers stopped and woken, the
halves are those of the two logs, and exactly the feedback to which no result belongs is given up."""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from schemas import topics
from streams.fold.recent_results import DISPOSED
from tests.support.pairing_support import (
    BOTH,
    HORIZON,
    PARTITION,
    SLACK,
    Broker,
    Worker,
    bare,
    expected,
    far_end,
    half_ids,
    result,
)
from tests.support.stream_records import make_feedback

# More for a long search: TENTALIS_TEST_EXAMPLES=20000 pytest tests/unit/streams/fold/test_pairing_property.py
EXAMPLES = int(os.environ.get("TENTALIS_TEST_EXAMPLES", "50"))
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PAUSES = st.sampled_from([0, 1, 5, HORIZON // 2, HORIZON - 1, HORIZON, HORIZON + 1, 2 * HORIZON, 2 * HORIZON + 1])
TASKS = st.sampled_from("ab")
SAMPLES = st.sampled_from([0, 1])
RECORDS = st.one_of(
    st.tuples(st.just("result"), PAUSES, TASKS, SAMPLES, st.sampled_from([1, 2])),
    st.tuples(st.just("bare"), PAUSES, TASKS, st.sampled_from([None, 0, 1, 7])),
    st.tuples(st.just("whole"), PAUSES, TASKS, SAMPLES),
    st.tuples(st.just("rubbish"), PAUSES, TASKS, st.sampled_from(BOTH)),
)
TOPICS, SIZES, CUTS = st.sampled_from(BOTH), st.integers(1, 6), st.integers(0, 6)
ACTIONS = st.one_of(
    st.tuples(st.just("batch"), TOPICS, SIZES),
    st.tuples(st.just("batch"), TOPICS, SIZES),
    st.tuples(st.just("uncommitted"), TOPICS, SIZES),
    st.tuples(st.just("timer")),
    st.tuples(st.just("kill"), TOPICS, SIZES, CUTS),
    st.tuples(st.just("kill timer"), CUTS),
    st.tuples(st.just("stop"), TOPICS, SIZES, CUTS),
    st.tuples(st.just("wake"), CUTS),
    st.tuples(st.just("wake and go on"), TOPICS, SIZES, CUTS),
)


def write(broker: Broker, records: list[tuple[Any, ...]]) -> int:
    """Writes the logs; returns the time of the last record."""
    at = 10_000
    for number, (kind, pause, task, *rest) in enumerate(records):
        at += pause
        match kind:
            case "result":
                broker.logs.put(topics.RESULTS, result(task, *rest), at)
            case "bare":
                broker.logs.put(topics.FEEDBACK, bare(task, *rest, f"f{number}"), at)
            case "whole":
                speaks = make_feedback(result(task, *rest), feedback_id=f"f{number}")
                broker.logs.put(topics.FEEDBACK, speaks, at)
            case "rubbish":
                broker.logs.put_raw(rest[0], task, at)
    return at


async def live(broker: Broker, actions: list[tuple[Any, ...]]) -> None:
    """Workers come and go over the logs."""
    worker, stopped = Worker(broker), list[Worker]()
    for action, *rest in actions:
        match action:
            case "batch" | "uncommitted":
                if await worker.batch(*rest):
                    worker.flush()
                    if action == "batch":
                        worker.commit()
            case "timer":
                if await worker.timer():
                    worker.flush()
            case "kill":
                await worker.batch(rest[0], rest[1])
                worker.flush(rest[2])
                worker = Worker(broker)
            case "kill timer":
                await worker.timer()
                worker.flush(rest[0])
                worker = Worker(broker)
            case "stop":
                await worker.batch(rest[0], rest[1])
                worker.flush(rest[2])
                stopped.append(worker)
                worker = Worker(broker)
            case "wake" if stopped:
                stopped[0].flush(rest[0])
                if not stopped[0].pending:
                    stopped.pop(0)
            case "wake and go on" if stopped:
                zombie = stopped.pop(0)
                zombie.flush()
                await zombie.batch(rest[0], rest[1])
                zombie.flush(rest[2])
                event("a zombie went on")
    while any([await worker.batch(topic, 4) and worker.flush() is None for topic in BOTH]):
        worker.commit()
    while await worker.timer():
        worker.flush()


@pytest.mark.parametrize("kind", ["scoring", "hinting"])
@QUICK
@given(st.lists(RECORDS, max_size=14), st.lists(ACTIONS, max_size=14))
def test_the_halves_are_those_of_the_logs_however_they_are_read(
    kind: str, records: list[tuple[Any, ...]], actions: list[tuple[Any, ...]]
) -> None:
    broker = Broker(kind)
    end = write(broker, records)
    far_end(broker.logs, end + 2 * HORIZON + SLACK + 1)

    async def story() -> None:
        await live(broker, actions)
        halves, lonely = await expected(kind, broker.logs)
        found = half_ids(broker.outputs)
        assert found == halves
        assert {record.offset for record in broker.given_up} == (lonely if kind == "hinting" else set())
        if halves and lonely:
            event("some answered, some not")

    asyncio.run(story())


@QUICK
@given(st.lists(RECORDS, max_size=14), st.lists(ACTIONS, max_size=10))
def test_nothing_is_left_when_everything_is_over(
    records: list[tuple[Any, ...]], actions: list[tuple[Any, ...]]
) -> None:
    broker = Broker("hinting")
    end = write(broker, records)
    far_end(broker.logs, end + 2 * HORIZON + SLACK + 1)

    async def story() -> None:
        await live(broker, actions)
        far_end(broker.logs, end + 5 * HORIZON)
        await live(broker, [])
        worker = Worker(broker)
        pairing = worker.app._pairing
        assert pairing is not None
        recent = pairing._partitions[PARTITION]
        assert (recent.waiting, recent.results) == (0, 1)  # the far end itself

    asyncio.run(story())
    assert all(key.startswith("results/") or key == DISPOSED for key in broker.state())
