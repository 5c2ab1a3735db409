"""Follows the topics that hold a gateway's requests and what was learned from them."""

from __future__ import annotations

import time
from collections.abc import Generator

from schemas import topics
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Follower, Stored
from tentalis.kafka.offsets import end_offsets, offsets_at
from tentalis.kafka.skipped import SKIPPED
from tentalis.ops.sessions.learned import LearnedEntry, entry_of
from tentalis.service.settings import Settings

FOLLOWED = (topics.SESSIONS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.BATCHES)
"""In the order of cause and effect, for records of the same millisecond."""
POLL_S = 0.05
SETTLE_S = 0.5
"""Time for which an entry is kept, so that records of another topic that were appended earlier come first."""


def follow_learning(
    settings: Settings, since_ms: int | None, *, stop_at_end: bool
) -> Generator[LearnedEntry, None, None]:
    """Yields the entries of records that were appended since `since_ms`, or from now on if it is None, by append time;
    with `stop_at_end`, up to the current ends of the topics.

    Uses no consumer group. Raises NoSuchTopic, Forbidden, KafkaException.
    """
    codec = make_codec(settings)
    followers: list[Follower] = []
    try:
        for topic in FOLLOWED:
            followers.append(Follower(settings, topic, _starts(settings, topic, since_ms)))
        waiting: list[tuple[float, int, LearnedEntry]] = []
        caught_up = False
        while True:
            arrived = time.monotonic()
            for rank, follower in enumerate(followers):
                waiting += ((arrived, rank, entry) for entry in _entries(follower.poll(POLL_S), codec))
            # The order of the past is known once all of it is read.
            caught_up = caught_up or all(follower.caught_up for follower in followers)
            if not caught_up:
                continue
            settled = arrived + (1.0 if stop_at_end else -SETTLE_S)
            ready = sorted((entry.at, rank, n) for n, (moment, rank, entry) in enumerate(waiting) if moment <= settled)
            yield from (waiting[n][2] for _, _, n in ready)
            waiting = [each for each in waiting if each[0] > settled]
            if stop_at_end:
                return
    finally:
        for follower in followers:
            follower.close()


def _starts(settings: Settings, topic: str, since_ms: int | None) -> dict[int, int]:
    """The first offsets to read: a partition without a record since then begins at its end."""
    starts = end_offsets(settings, topic)
    if since_ms is not None:
        found = offsets_at(settings, topic, since_ms)
        starts |= {partition: offset for partition, offset in found.items() if offset is not None}
    return starts


def _entries(found: list[Stored], codec: Codec) -> Generator[LearnedEntry, None, None]:
    for stored in found:
        if stored.value is None:
            continue
        try:
            record = stored.decode(codec)
        except DecodeError as error:  # the application that owns the topic dead-letters it
            SKIPPED.add(error)
            continue
        entry = entry_of(record, stored.timestamp)
        if entry is not None:
            yield entry
