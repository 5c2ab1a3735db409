"""Reads what the learning units are computed from: the control topics, the waiting rollouts, and recent halves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from schemas import topics
from schemas.records import Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.offsets import offsets_at
from tentalis.kafka.reader import records_to_end
from tentalis.kafka.record_reader import RecordReader
from tentalis.ops.groups.core import GroupLag
from tentalis.ops.groups.learning import (
    WINDOW_MS,
    LearningLag,
    Place,
    TrainingLog,
    WaitingRollouts,
    learning_lag,
    stages_to_rollout,
)
from tentalis.service.settings import Settings

SAMPLED_ROLLOUTS = 8
"""The rollouts of a plan whose halves are looked up."""
READ_S = 10.0
"""Longest wait for one record."""
MOST_BYTES = 64 * 2**20


class UnknownPolicy(Exception):
    """The log has no run of a policy."""


def read_learning_lags(
    settings: Settings, groups: Sequence[GroupLag], now_ms: int, only: Collection[str] = ()
) -> list[LearningLag]:
    """Returns the learning lag of every policy, or only of some. Reads the rollouts that wait for training.

    `groups`: all groups, with the ages of their oldest unread records. Raises UnknownPolicy.
    """
    codec = make_codec(settings)
    log = _training_log(settings, codec)
    unknown = sorted(set(only) - {*log.policies})
    if unknown:
        known = ", ".join(log.policies) or "none"
        raise UnknownPolicy(f"no run of the policy {', '.join(unknown)} is on the log; policies: {known}")
    trainings = [log.training_of(policy) for policy in log.policies if not only or policy in only]
    since = now_ms - WINDOW_MS
    counts = [WaitingRollouts(each.policy, each.low_water, since) for each in trainings]
    _count_rollouts(settings, codec, counts, since)
    by_name = {lag.group.name: lag for lag in groups}
    streams = {each.name: by_name.get(each.consumer_group()) for each in topology.streams()}
    ages = {name: None if lag is None else lag.seconds(now_ms) for name, lag in streams.items()}
    inactive = [name for name, lag in streams.items() if lag is None or not lag.active]
    found = []
    for training, waiting in zip(trainings, counts, strict=True):
        trainer = by_name.get(topology.named("trainer").consumer_group(policy=training.policy))
        before = stages_to_rollout(ages, inactive, _seconds_in_join(settings, codec, training.newest_rows))
        active = trainer is not None and trainer.active
        found.append(learning_lag(training, waiting, before, now_ms, trainer_active=active))
    return found


def _training_log(settings: Settings, codec: Codec) -> TrainingLog:
    log = TrainingLog()
    for record in records_to_end(settings, (topics.RUNS, topics.BATCHES, topics.POLICY_ACKS), codec):
        log.apply(record)
    return log


def _count_rollouts(settings: Settings, codec: Codec, counts: Sequence[WaitingRollouts], since_ms: int) -> None:
    """Reads the rollouts topic from the lowest low water, or from the beginning of the window if that comes first."""
    if not counts:
        return
    recent = offsets_at(settings, topics.ROLLOUTS, since_ms)
    start = {
        p: min([*(each.low_water.get(p, 0) for each in counts), *([] if offset is None else [offset])])
        for p, offset in recent.items()
    }
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start):
        if stored.value is None:
            continue
        try:
            record = stored.decode(codec)
        except DecodeError:
            continue  # the trainer dead-letters it
        if isinstance(record, Rollout):
            for each in counts:
                each.add(record, stored.partition, stored.offset, stored.timestamp)


def _seconds_in_join(settings: Settings, codec: Codec, rows: Sequence[Place]) -> float | None:
    """Returns the median time from the first half of a rollout to the rollout, by append times; None if no rollout
    with a half is left on the log."""
    reader = RecordReader(settings, patience_s=READ_S, most_bytes=MOST_BYTES)
    try:
        waits = [
            wait
            for partition, offset in rows[:SAMPLED_ROLLOUTS]
            if (wait := _wait_of(reader, codec, partition, offset)) is not None
        ]
    finally:
        reader.close()
    return median(waits) / 1000 if waits else None


def _wait_of(reader: RecordReader, codec: Codec, partition: int, offset: int) -> int | None:
    message = reader.read(topics.ROLLOUTS, partition, [offset])[offset]
    if message is None or message.value() is None:
        return None
    stored = Stored.of(message)
    record = stored.decode(codec)
    if not isinstance(record, Rollout):
        return None
    halves = [
        int(half.timestamp()[1])
        for each in record.provenance
        if (half := reader.read(each.topic, each.partition, [each.offset])[each.offset]) is not None
    ]
    return max(0, stored.timestamp - min(halves)) if halves else None
