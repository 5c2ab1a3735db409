"""The metrics of the join."""

import asyncio

from schemas import topics
from schemas.records import Record
from streams.apps.join.processor import JoinProcessor
from streams.runtime.processor import LogRecord
from tests.support.exporters import exporter_of_app
from tests.support.join_support import CODEC, LIMITS, PARTITION, START, head, hint, open_, sample, score, tick


def test_the_join_counts_what_became_of_samples_and_what_it_gave_up() -> None:
    join = JoinProcessor(CODEC, LIMITS)
    join.restore(PARTITION, {})
    registry = exporter_of_app(join).registry
    joined, alone, expired = (head(name) for name in ("joined", "alone", "expired"))
    events: list[tuple[int, Record]] = [
        (START, open_(joined)),
        (START, open_(expired)),
        (START + 1, score(sample(joined))),
        (START + 2, score(sample(joined))),  # the same half once more
        (START + 3, hint(sample(joined))),
        (START + 4, score(sample(alone))),
        (START + 5, hint(sample(joined), id="another")),
    ]
    log = [
        LogRecord(topics.HALVES, PARTITION, offset, at, event.key, CODEC.encode(topics.HALVES, event))
        for offset, (at, event) in enumerate(events)
    ]
    asyncio.run(join.process(PARTITION, log))

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tentalis_{name}", labels)

    assert read("join_open_tasks") == 2
    assert read("join_oldest_open_seconds") == 0.005
    assert read("join_stream_timestamp_seconds", partition=str(PARTITION)) == (START + 5) / 1000
    assert read("join_duplicates_total") == 1
    assert read("join_outcomes_total", kind="both") == 1
    assert read("join_outcomes_total", kind="late") == 1
    end = LogRecord(
        topics.HALVES, PARTITION, len(log), START + 1_001, str(PARTITION), CODEC.encode(topics.HALVES, tick())
    )
    asyncio.run(join.process(PARTITION, [end]))
    assert read("join_open_tasks") == read("join_oldest_open_seconds") == 0
    assert read("join_remembered_tasks") == 3
    assert read("join_timeouts_total", wait="hint") == 1
    assert read("join_timeouts_total", wait="deadline") == 1
    assert read("join_outcomes_total", kind="rl") == read("join_outcomes_total", kind="expired") == 1
    assert read("join_rollouts_total") == 2
    decoded = read("stream_decode_seconds_total", app="tentalis-join")
    assert decoded is not None and decoded > 0
