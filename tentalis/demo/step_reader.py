"""Reads the records of the last steps from the log, and follows it."""

import time
from collections.abc import Generator, Iterator

from schemas import topics
from schemas.records import BatchPlan, RunManifest
from schemas.wire.codec import Codec
from tentalis.demo.recent_steps import RecentSteps, StepTimes, window_of
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Follower, read_to_end
from tentalis.kafka.offsets import end_offsets, offsets_at
from tentalis.kafka.reader import decoded, records_to_end
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

WINDOWED = (topics.BATCHES, topics.TASKS, topics.RESULTS, topics.OUTCOMES, topics.POLICIES, topics.POLICY_ACKS)
"""The topics that are read from the beginning of the window on; the manifests are all read."""
PLAN_OFFSETS = 200
"""Offsets of the batches topic that are looked through for plans: a step takes four, with two transaction markers."""
ANEW_S = 900.0
"""Seconds after which the window is read anew: nothing older stays in memory."""
POLL_S = 0.5


def read_step_times(settings: Settings) -> Generator[list[StepTimes] | None, None, None]:
    """Yields the times of the last steps about every POLL_S seconds, None until the log is read to its end. Ends after
    ANEW_S seconds.

    Raises NoBroker, NoSuchTopic, Forbidden, Unreachable, KafkaException, TimeoutError.
    """
    until = time.monotonic() + ANEW_S
    codec = make_codec(settings)
    followed = (topics.RUNS, *WINDOWED)
    # Before anything is read: a record that comes meanwhile is read by the follower.
    starts = {(topic, partition): end for topic in followed for partition, end in end_offsets(settings, topic).items()}
    manifests = [each for each in records_to_end(settings, (topics.RUNS,), codec) if isinstance(each, RunManifest)]
    window = window_of(manifests, _newest_plans(settings, codec, starts), now_ms())
    for topic in WINDOWED:
        for partition, offset in offsets_at(settings, topic, window.since).items():
            if offset is not None:
                starts[topic, partition] = offset
    steps = RecentSteps(manifests, window)
    follower = Follower(settings, *followed, start=starts)
    try:
        while time.monotonic() < until:
            for stored, record in decoded(follower.poll(POLL_S), codec):
                steps.apply(record, stored.timestamp)
            yield steps.rows() if follower.caught_up else None
    finally:
        follower.close()


def _newest_plans(
    settings: Settings, codec: Codec, ends: dict[tuple[str, int], int]
) -> Iterator[tuple[BatchPlan, int]]:
    """Yields the newest plans with their times, in log order."""
    start = {
        partition: max(0, end - PLAN_OFFSETS) for (topic, partition), end in ends.items() if topic == topics.BATCHES
    }
    for stored, record in decoded(read_to_end(settings, topics.BATCHES, start=start), codec):
        if isinstance(record, BatchPlan):
            yield record, stored.timestamp
