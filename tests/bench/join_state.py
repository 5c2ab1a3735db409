"""State of the join as it lies on its changelog, without folding a million tasks through a worker to get there.

Open tasks are folded by the join itself, one score each. Closed ones are `MARKERS` tasks folded to their end, whose
markers are repeated under as many names as wanted. All of it lies before offset 0 of the halves log, so that a worker
goes on with whatever the log holds.
"""

import time
from collections.abc import Iterator

import numpy as np

from schemas import topics
from schemas.codec import Codec
from schemas.records import Record
from streams.join.core import Limits, Partition, Tally
from streams.join.emit import Place
from streams.join.state import TASK
from streams.processor import payload_of, stamped
from tests.bench.join_load import hint_of, sample_of, score_of

PARTITIONS = 8
MARKERS = 500
CHUNK = 200

Row = tuple[int, str, bytes]
"""Partition, key, value."""


def state_rows(codec: Codec, open_tasks: int, closed_tasks: int, n_tokens: int) -> Iterator[Row]:
    """The changelog's records of so many tasks, evenly over the partitions; open ones wait with n_tokens tokens."""
    for partition in range(PARTITIONS):
        count = len(range(partition, open_tasks, PARTITIONS))
        yield from _open(codec, partition, count, n_tokens)
    markers = _markers(codec)
    for index in range(closed_tasks):
        yield index % PARTITIONS, f"{TASK}closed-{index}", markers[index % len(markers)]


def _fold(codec: Codec, partition: int) -> Partition:
    def read(offset: int, raw: bytes | None) -> Record:
        return codec.decode(raw, topic=topics.HALVES, partition=partition, offset=offset)

    fold = Partition(Place(topics.HALVES, partition), read, Limits(), Tally())
    fold.restore({})
    return fold


def _open(codec: Codec, partition: int, count: int, n_tokens: int) -> Iterator[Row]:
    fold, rng, now = _fold(codec, partition), np.random.default_rng(partition), time.time_ns() // 1_000_000
    # One record more than tasks, so that there is a clock where nothing is open.
    fold.advance(-count - 1, now)
    for offset in range(-count, 0):
        score = score_of(sample_of(f"open-{partition}-{-offset}", rng, n_tokens), now)
        fold.advance(offset, now)
        fold.apply(score, codec.encode(topics.HALVES, score))
        if offset % CHUNK == 0:
            yield from _rows(fold, partition)
    yield from _rows(fold, partition)


def _rows(fold: Partition, partition: int) -> Iterator[Row]:
    for wave in fold.take_changes():
        for key, value in wave:
            assert value is not None, f"{key} is deleted, but nothing was closed"
            yield partition, key, value


def _markers(codec: Codec) -> list[bytes]:
    fold, rng, now = _fold(codec, 0), np.random.default_rng(0), time.time_ns() // 1_000_000
    for index in range(MARKERS):
        sample = sample_of(f"closed-{index}", rng, 10)
        for nth, half in enumerate((score_of(sample, now), hint_of(sample, now, False, rng))):
            fold.advance(2 * index + nth, now)
            fold.apply(half, codec.encode(topics.HALVES, half))
    changes = [change for wave in fold.take_changes() for change in wave]
    return [stamped(-1, payload_of(value)) for key, value in changes if key.startswith(TASK) and value is not None]
