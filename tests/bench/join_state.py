"""Changelog records of the join's state, made without running a million tasks through a worker.

Open tasks are folded by the join itself, one score each. Closed ones are `MARKERS` tasks folded to their end, whose
markers are repeated under as many names as needed. All applied offsets are below 0, so that a worker then processes the
halves log from its beginning. `quix_rows` yields the same tasks as the join in Quix Streams keeps them, and `closing`
the hints that close some of the open ones.
"""

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np

from schemas import topics
from schemas.records import Record, Score
from schemas.wire.codec import Codec
from streams.apps.join.core import JoinCounts, JoinLimits, JoinPartition
from streams.apps.join.emit import HalvesPartition
from streams.apps.join.state import TASK
from streams.runtime.processor import payload_of, stamped
from tentalis.kafka.producer import headers_of
from tests.bench.join_load import Half, hint_of, sample_of, score_of
from tests.bench.join_quix_state import HEAD, MARKER_TTL_MS, OFFSETS, PREFIX, entry_of

PARTITIONS = 8
MARKERS = 500
CHUNK = 200

Row = tuple[int, str, bytes]
"""(partition, key, value)"""


def state_rows(codec: Codec, open_tasks: int, closed_tasks: int, n_tokens: int) -> Iterator[Row]:
    """Yields the changelog records of open and closed tasks, evenly over the partitions; the waiting halves of open
    tasks have n_tokens tokens."""
    for partition in range(PARTITIONS):
        yield from _open(codec, partition, _share(open_tasks, partition), n_tokens)
    markers = _markers(codec)
    for index in range(closed_tasks):
        yield index % PARTITIONS, f"{TASK}closed-{index}", markers[index % len(markers)]


def quix_rows(codec: Codec, open_tasks: int, closed_tasks: int, n_tokens: int) -> Iterator[Row]:
    """Yields the changelog records of the same tasks for the join with Quix Streams, with its key prefix."""
    prefix, now = PREFIX.decode(), _now()
    for partition in range(PARTITIONS):
        for offset, score in enumerate(_scores(partition, _share(open_tasks, partition), n_tokens, now), OFFSETS):
            deadline = now + score.sample.head.terms.deadline_ms
            entry = entry_of(score.score_id, 0, score.sample.result_id, offset)
            yield partition, f"{prefix}half/{offset}", codec.encode(topics.HALVES, score)
            yield partition, f"{prefix}task/{score.key}", HEAD.pack(1, deadline, now, 1, 1) + entry
    for index in range(closed_tasks):
        entries = b"".join(entry_of(f"{half}-{index}", 0, f"result-{index}", index) for half in ("score", "hint"))
        yield index % PARTITIONS, f"{prefix}task/closed-{index}", HEAD.pack(2, now + MARKER_TTL_MS, 0, 1, 0) + entries


def closing(codec: Codec, open_tasks: int, n_tokens: int, nth: int) -> Iterator[tuple[int, Half]]:
    """Yields the hint that closes the nth open task of each partition: (partition, half)."""
    rng, now = np.random.default_rng(nth), _now()
    for partition in range(PARTITIONS):
        scores = _scores(partition, _share(open_tasks, partition), n_tokens, now)
        sample = next(islice(scores, nth, None)).sample
        hint = hint_of(sample, now, False, rng)
        yield partition, (hint.key, codec.encode(topics.HALVES, hint), headers_of(hint, "bench"))


def _share(tasks: int, partition: int) -> int:
    return len(range(partition, tasks, PARTITIONS))


def _now() -> int:
    return time.time_ns() // 1_000_000


def _scores(partition: int, count: int, n_tokens: int, now: int) -> Iterator[Score]:
    """Yields the waiting halves of a partition's open tasks."""
    rng = np.random.default_rng(partition)
    for number in range(count):
        yield score_of(sample_of(f"open-{partition}-{number}", rng, n_tokens), now)


def _fold(codec: Codec, partition: int) -> JoinPartition:
    def read(offset: int, raw: bytes | None) -> Record:
        return codec.decode(raw, topic=topics.HALVES, partition=partition, offset=offset)

    fold = JoinPartition(HalvesPartition(topics.HALVES, partition), read, JoinLimits(), JoinCounts())
    fold.restore({})
    return fold


def _open(codec: Codec, partition: int, count: int, n_tokens: int) -> Iterator[Row]:
    fold, now = _fold(codec, partition), _now()
    # One record more than tasks, to write a clock even without open tasks; up to -2, because a new fold is at -1.
    fold.advance(-count - 2, now)
    for offset, score in enumerate(_scores(partition, count, n_tokens, now), -count - 1):
        fold.advance(offset, now)
        fold.apply(score, codec.encode(topics.HALVES, score))
        if offset % CHUNK == 0:
            yield from _rows(fold, partition)
    yield from _rows(fold, partition)


def _rows(fold: JoinPartition, partition: int) -> Iterator[Row]:
    for wave in fold.take_changes():
        for key, value in wave:
            assert value is not None, f"{key} is deleted, but no task was closed"
            yield partition, key, value


def _markers(codec: Codec) -> list[bytes]:
    fold, rng, now = _fold(codec, 0), np.random.default_rng(0), _now()
    for index in range(MARKERS):
        sample = sample_of(f"closed-{index}", rng, 10)
        for nth, half in enumerate((score_of(sample, now), hint_of(sample, now, False, rng))):
            fold.advance(2 * index + nth, now)
            fold.apply(half, codec.encode(topics.HALVES, half))
    changes = [change for wave in fold.take_changes() for change in wave]
    return [stamped(-1, payload_of(value)) for key, value in changes if key.startswith(TASK) and value is not None]
