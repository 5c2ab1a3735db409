"""Mutated records from a seed on the codec and on the applications' own code, without a broker: nothing gets out but
records and reasons. `tests.chaos.fuzz` sends them through the running applications."""

import resource
from collections import Counter, defaultdict

import pytest

from schemas import topics
from schemas.wire.codec import DecodeError
from streams.apps.aggregation.processor import Aggregation
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring.processor import Scoring
from streams.apps.sessions.processor import SessionsProcessor
from streams.runtime.processor import LogRecord, Processor
from tests.support.fuzzing import CODEC, fuzzed
from tests.support.join_support import drive

COUNT = 4_000
HEADROOM_MB = 300
"""More than a decoder needs that believes nothing, less than one needs that believes a single bomb."""


def resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_decoded_is_a_record_and_all_else_has_a_reason(seed: int) -> None:
    before, seen = resident_mb(), Counter[str]()
    for each in fuzzed(seed, COUNT):
        place = {"topic": each.topic, "partition": each.partition, "offset": 0}
        expected = topics.table().records_of(each.topic)
        try:
            record = CODEC.decode(each.value, **place, expected=expected)  # type: ignore[arg-type]
        except DecodeError as error:
            seen[f"{each.damage}: {error.stage}"] += 1
            continue
        seen["record"] += 1
        # A record that was let in can be written, and is then what is read again.
        again = CODEC.encode(each.topic, record)
        assert CODEC.encode(each.topic, CODEC.decode(again, **place)) == again  # type: ignore[arg-type]
    assert resident_mb() - before < HEADROOM_MB
    assert seen["record"] > COUNT / 5 and len(seen) > 12, seen


@pytest.mark.parametrize("build", [Scoring, Aggregation, JoinProcessor, SessionsProcessor])
def test_the_applications_answer_with_dead_letters(build: type) -> None:
    processor: Processor = build(CODEC)
    processor.restore(3, {})
    logs: dict[str, list[LogRecord]] = defaultdict(list)
    for each in fuzzed(3, 3 * COUNT):
        key = None if each.key is None else each.key.decode("utf-8", "surrogateescape")
        log = logs[each.topic]
        headers = tuple((name, value or b"") for name, value in each.headers)
        at = 1_700_000_000_000 + 10 * len(log)
        log.append(LogRecord(each.topic, 3, len(log), at, key, each.value or b"", headers, each.value is None))
    sent = [record for topic in processor.topics for record in logs[topic]]
    dead = sum(len(drive(processor.process(3, [record])).dead) for record in sent)
    assert dead > len(sent) / 4
