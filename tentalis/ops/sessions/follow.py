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
from tentalis.ops.sessions.append_order import AppendOrder
from tentalis.ops.sessions.learned import LearnedEntry, entry_of
from tentalis.service.settings import Settings

FOLLOWED = (topics.SESSIONS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.BATCHES)
"""In the order of cause and effect, for records of the same millisecond."""
POLL_S = 0.2
SETTLE_S = 1.0
"""Time for which an entry is kept, so that records of another topic that were appended earlier come first."""


def follow_learning(
    settings: Settings, since_ms: int | None, *, stop_at_end: bool
) -> Generator[LearnedEntry, None, None]:
    """Yields the entries of records that were appended since `since_ms`, or from now on if it is None, by append time;
    with `stop_at_end`, up to the current ends of the topics.

    Uses no consumer group. Raises NoSuchTopic, Forbidden, KafkaException.
    """
    codec = make_codec(settings)
    follower = Follower(settings, *FOLLOWED, start=_starts(settings, since_ms))
    try:
        order, found = AppendOrder(), list[tuple[int, LearnedEntry]]()
        while True:
            found += _entries(follower.poll(POLL_S), codec)
            # The order of the past is known once all of it is read.
            if not follower.caught_up:
                continue
            now = time.monotonic()
            order.add(found, now)
            found = []
            yield from order.take(now if stop_at_end else now - SETTLE_S)
            if stop_at_end:
                return
    finally:
        follower.close()


def _starts(settings: Settings, since_ms: int | None) -> dict[tuple[str, int], int]:
    """The first offsets to read: a partition without a record since then begins at its end."""
    starts: dict[tuple[str, int], int] = {}
    for topic in FOLLOWED:
        starts |= {(topic, p): offset for p, offset in end_offsets(settings, topic).items()}
        if since_ms is not None:
            found = offsets_at(settings, topic, since_ms)
            starts |= {(topic, p): offset for p, offset in found.items() if offset is not None}
    return starts


def _entries(found: list[Stored], codec: Codec) -> Generator[tuple[int, LearnedEntry], None, None]:
    """Yields the entries of records, each with the rank of its topic."""
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
            yield FOLLOWED.index(stored.topic), entry
