"""Aggregation: means per manager, worker and environment in event-time windows, for meta-RL and monitoring.

| input | contribution to the window of its event time |
|---|---|
| Outcome | its kind; its reward, if known, to count, mean and variance |
| Outcome of a late half or a superseded result | its kind |
| Feedback with its result | its grade in [0, 1] (score, or polarity), if it has one |

Every changed window is written as a MetaSignal: `count` is the number of known rewards, `feedback_count` of graded
feedback, so that means and variances can be combined exactly. The records of a window are spread over the partitions
(keys are task ids) and over two topics, so each signal is the bucket of **one partition of one input**, under the Kafka
key `manager/worker/environment/window start/partition/outcomes` (or `/feedback`). A reader combines the newest signals
of the keys it wants (`tentalis.rewards.moments.combine`). This needs no second topic and no state outside the
partition, and each signal depends on one partition's log alone. See docs/concepts/aggregation.md.

A worker that was frozen in the middle of a flush, lost its partition and then resumes may write an older signal of a
window behind the newest. So a worker that takes over a partition writes all its open windows again, and every window is
written again when it closes: that signal is final, even if the window received nothing in between.

Feedback without its result belongs to no window (it names neither manager nor worker nor environment) and is counted.
Scoring finds its result; its reward then comes with the outcome.

Owner of the dead letters of outcomes; hinting owns those of feedback.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

from schemas import topics
from schemas.records import Feedback, MetaSignal, Outcome, OutcomeKind
from schemas.wire.codec import Codec
from streams.apps.aggregation import metrics
from streams.apps.aggregation.core import Bucket, Event, TopicFold, Window, changes, commit, fold, topic_folds
from streams.runtime.decoding import INVALID, Skipped, dead, decoded, output
from streams.runtime.metrics import SKIPPED, STREAM_DECODE_SECONDS
from streams.runtime.processor import Effects, LogRecord, OutputRecord, in_turns
from tentalis.kafka import topology
from tentalis.rewards import registry
from tentalis.rewards.grade import grade
from tentalis.rewards.moments import Moments
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

APP_ID = topology.named("aggregation").app_id
WINDOW_MS = 60_000
RETENTION_MS = 3_600_000
"""Log time after its end in which a window still takes records. Event ids are kept as long: about 100 bytes of memory
for each record in that time."""

TAGS = {topics.OUTCOMES: "outcomes", topics.FEEDBACK: "feedback"}
"""The beginning of the state keys of each input topic."""
# A sample has one ordinary outcome; outcomes of these kinds come in addition.
_BESIDE = frozenset({OutcomeKind.LATE, OutcomeKind.SUPERSEDED})


def outcome_event(outcome: Outcome, offset: int, timestamp: int) -> Event:
    """Converts an outcome into the event that its window adds."""
    return Event(
        offset=offset,
        timestamp=timestamp,
        event_time=outcome.event_time,
        event_id=outcome.event_id,
        manager_id=outcome.head.manager_id,
        worker_id=outcome.worker_id,
        environment=outcome.head.environment,
        value=None if outcome.kind in _BESIDE else outcome.reward,
        kind=outcome.kind.value,
    )


def feedback_event(feedback: Feedback, offset: int, timestamp: int) -> Event | None:
    """Converts a feedback into the event that its window adds; None if it has no grade or no result."""
    reward = grade(feedback)
    if feedback.result is None or reward is None:
        return None
    return Event(
        offset=offset,
        timestamp=timestamp,
        event_time=feedback.event_time,
        event_id=feedback.event_id,
        manager_id=feedback.result.task.manager_id,
        worker_id=feedback.result.worker_id,
        environment=feedback.result.task.environment,
        value=(reward + 1.0) / 2.0,
    )


def signal(window: Window, partition: int, tag: str, bucket: Bucket, event_time: int) -> MetaSignal:
    """The MetaSignal of a window in one partition of an input."""
    graded = tag == TAGS[topics.FEEDBACK]
    reward, grades = (Moments(), bucket.moments) if graded else (bucket.moments, Moments())
    return MetaSignal(
        manager_id=window.manager_id,
        worker_id=window.worker_id,
        environment=window.environment,
        partition=partition,
        event_time=event_time,
        window_start=window.start,
        window_ms=window.length,
        count=reward.n,
        mean_reward=reward.mean if reward.n else None,
        reward_variance=reward.variance,
        outcomes=dict(sorted(bucket.kinds.items())),
        feedback_count=grades.n,
        mean_feedback_score=grades.mean if grades.n else None,
        feedback_variance=grades.variance,
    )


class Aggregation:
    """The application; see the module docstring. Times are in ms."""

    app_id = APP_ID
    topics = (topics.OUTCOMES, topics.FEEDBACK)
    table = "state"

    def __init__(self, codec: Codec, *, window_ms: int = WINDOW_MS, retention_ms: int = RETENTION_MS) -> None:
        self._codec = codec
        self._window_ms = window_ms
        self._retention_ms = retention_ms
        self._partitions: dict[int, dict[str, TopicFold]] = {}
        self._taken_over: set[int] = set()
        self.skipped = Skipped()
        self.late = 0
        self.duplicates = 0
        self.bare = 0

    def measure(self, exporter: Exporter) -> None:
        """Registers the metrics of the application."""
        exporter.read(STREAM_DECODE_SECONDS, lambda: self._codec.decode_seconds)
        exporter.read(SKIPPED, lambda: self.skipped.count)
        exporter.read(metrics.AGGREGATION_BARE, lambda: self.bare)
        exporter.read(metrics.AGGREGATION_LATE, lambda: self.late)
        exporter.read(metrics.AGGREGATION_DUPLICATES, lambda: self.duplicates)

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores the state of a partition. Raises ValueError for an entry that this application did not write."""
        self._partitions[partition] = topic_folds(TAGS.values(), entries)
        self._taken_over.add(partition)

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._partitions.pop(partition, None)
        self._taken_over.discard(partition)

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Returns true if the partition was taken over and its windows have not been written since."""
        return partition in self._taken_over

    async def expire(self, partition: int) -> Effects:
        """Returns the open windows of a partition, unchanged."""
        self._taken_over.discard(partition)
        made = [
            self._signal(partition, tag, window, bucket, topic_fold.stream_time)
            for tag, topic_fold in self._partitions[partition].items()
            for window, bucket in sorted(topic_fold.buckets.items(), key=lambda item: item[0])
        ]
        return Effects(outputs=made)

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        """Returns nothing: all output comes from input."""
        return ()

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        """Returns the windows that a batch of outcomes or feedback changes or closes."""
        effects = Effects()
        events: list[Event] = []
        async for record in in_turns(records):
            try:
                event = self._event(record)
            except INVALID as error:
                if record.topic == topics.OUTCOMES:
                    effects.dead.append(dead(record, error))
                else:
                    self.skipped.add(record, error)
            else:
                if event is not None:
                    events.append(event)
        if not events:
            return effects
        tag = TAGS[records[0].topic]
        topic_fold = self._partitions[partition][tag]
        step = fold(topic_fold, events, records[-1].offset, window_ms=self._window_ms, retention_ms=self._retention_ms)
        closing = {window: topic_fold.buckets[window] for window in step.closed if window in topic_fold.buckets}
        for window, bucket in sorted((closing | step.buckets).items(), key=lambda item: item[0]):
            effects.outputs.append(self._signal(partition, tag, window, bucket, step.stream_time))
        effects.changes = changes(tag, step)
        if step.late:
            log.warning("%s[%d]: %d records came after their window was closed", records[0].topic, partition, step.late)
        commit(topic_fold, step)
        self.late += step.late
        self.duplicates += step.duplicates
        return effects

    def _signal(self, partition: int, tag: str, window: Window, bucket: Bucket, now: int) -> OutputRecord:
        return output(self._codec, topics.META, signal(window, partition, tag, bucket, now), APP_ID)

    def _event(self, record: LogRecord) -> Event | None:
        if record.topic == topics.OUTCOMES:
            outcome = decoded(self._codec, record, Outcome)
            registry.check_environment(outcome.head.environment)
            return outcome_event(outcome, record.offset, record.timestamp)
        feedback = decoded(self._codec, record, Feedback)
        if feedback.result is not None:
            registry.check_environment(feedback.result.task.environment)
        elif grade(feedback) is not None:
            self.bare += 1
        return feedback_event(feedback, record.offset, record.timestamp)


def build(settings: Settings, *, window_ms: int = WINDOW_MS, retention_ms: int = RETENTION_MS) -> Aggregation:
    """Builds the application of a process, with the configured codec."""
    from tentalis.kafka.codec import make_codec

    return Aggregation(make_codec(settings, patience=0.0), window_ms=window_ms, retention_ms=retention_ms)
