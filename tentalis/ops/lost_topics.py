"""Finds topics that were lost, without starting an application: deleted, created again, or cut off.

In: the broker, with the ids on tentalis.topic-ids.v1, and below TENTALIS_HOME the checkpoints and the record of the
brokers on which a local stack has made its topics. Out: a description of
each loss, as the application that it concerns reports it at its start.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas import topics
from schemas.records import BatchPlan
from tentalis.kafka import topic_ids, topology
from tentalis.kafka.audit_log import not_given_up
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.identity import (
    SOURCES_KEY,
    CommittedOffset,
    OffsetRange,
    PartitionRecord,
    TopicIdentity,
    described,
    partition_losses,
    position_losses,
    recorded_sources,
)
from tentalis.kafka.moved_topics import moves, was_moved
from tentalis.kafka.reader import records_to_end
from tentalis.kafka.topic_client import TopicClient, committed_notes
from tentalis.kafka.topic_id_log import read_topic_ids, recorded_names
from tentalis.kafka.topic_ids import LostTopic
from tentalis.kafka.topology import Application
from tentalis.local.made_topics import empty_broker
from tentalis.ops.repartition.plan import MARKER
from tentalis.service.settings import Settings
from tentalis.storage.checkpoint_state import state_fields


def lost_topics(settings: Settings) -> list[str]:
    """Describes the lost topics by application; empty if there are none. Raises KafkaException, CommitsUnknown."""
    client = TopicClient(settings)
    names = {name for each in topology.streams() for name in (*each.consumes, *each.changelogs)}
    names |= {topics.ROLLOUTS, *topics.CONTROL}
    there = client.identities(names | {MARKER, topics.TOPIC_IDS})
    if MARKER in there:
        return [
            "a move of the topics to more partitions is not finished: `tentalis topics repartition` with the same "
            "number and --yes finishes it"
        ]
    if not there:
        emptied = empty_broker(settings)  # else a new broker: nothing that was recorded on it can be lost
        return [] if emptied is None else [emptied]
    records = read_topic_ids(settings)
    recorded = records.all_topics or {}
    names |= recorded.keys() & {*recorded_names()}
    identities = client.known_identities(names)
    # Without any of its topics, the committed offsets of an application are gone too: only recorded ids tell of a loss.
    streams = [
        each
        for each in topology.streams()
        if {*each.consumes, *each.changelogs} & identities.keys() or records.of(each.app_id)
    ]
    # The positions come before the ends of the logs: processes that run move both, and a position that is read later
    # may be behind an end that was read before.
    committed = {each.name: committed_notes(settings, each.consumer_group(), _places(each)) for each in streams}
    runs = [run for path in newest_checkpoint_states(settings.home) if (run := _run_position(path)) is not None]
    ranges = client.ranges((name, p) for name, there in identities.items() for p in range(there.partitions))
    # A log may have been trimmed up to what was read, but not committed yet, when the offsets were asked for.
    late = [
        each
        for each in streams
        if any(at in ranges and done.offset < ranges[at].begin for at, done in committed[each.name].items())
    ]
    committed |= {each.name: committed_notes(settings, each.consumer_group(), _places(each)) for each in late}
    found = [
        _of_stream(settings, each, identities, committed[each.name], ranges, records.of(each.app_id))
        for each in streams
    ]
    found += [_of_run(settings, run, identities, ranges) for run in runs]
    lost = topic_ids.lost(recorded, names, identities)
    found += [_of_others(each) for each in lost.values() if not any(f"{each.topic} " in text for text in found)]
    return [text for text in found if text]


def lost_broker(settings: Settings) -> str | None:
    """Describes the loss of the whole broker of a local stack: it has none of the topics any more. None without it.
    Raises Forbidden, KafkaException, Unreachable."""
    names = {*recorded_names(), topics.TOPIC_IDS, MARKER}
    return None if TopicClient(settings).identities(names) else empty_broker(settings)


def _of_others(lost: LostTopic) -> str:
    """Describes a lost topic of which no stream application and no run has a record."""
    readers = [
        each.name for each in topology.APPLICATIONS if not each.stream and lost.topic in (*each.consumes, *each.reads)
    ]
    return f"{', '.join(readers)}: {lost}" if readers else str(lost)


def _partitions(application: Application) -> range:
    return range(topics.table()[application.consumes[0]].partitions)


def _places(application: Application) -> list[tuple[str, int]]:
    return [(topic, partition) for topic in application.consumes for partition in _partitions(application)]


def _of_stream(
    settings: Settings,
    application: Application,
    identities: dict[str, TopicIdentity],
    committed: dict[tuple[str, int], CommittedOffset],
    ranges: dict[tuple[str, int], OffsetRange],
    registered: Mapping[int, Mapping[str, str]],
) -> str:
    (changelog,) = application.changelogs
    partitions, places = _partitions(application), _places(application)
    sources = {}
    # Kafka deletes the offsets of a topic with the topic. Only then is the long way worth its time.
    written = any((span := ranges.get((changelog, p))) is not None and span.end > 0 for p in partitions)
    if written and any(place[0] not in {topic for topic, _ in committed} for place in places):
        sources = dict(_sources_on(settings, changelog))
    losses = []
    for partition in partitions:
        own = {topic: committed[topic, partition] for topic in application.consumes if (topic, partition) in committed}
        record = PartitionRecord(own, sources.get(partition), registered=registered.get(partition, {}))
        losses += partition_losses(partition, application.consumes, changelog, record, identities, ranges)
    return f"{application.name}: {described(losses)}" if losses else ""


def _sources_on(settings: Settings, changelog: str) -> Iterator[tuple[int, dict[str, str]]]:
    for stored in read_to_end(settings, changelog):
        if stored.key == SOURCES_KEY and stored.value is not None:
            yield stored.partition, recorded_sources(stored.value)


def newest_checkpoint_states(home: Path) -> Iterator[Path]:
    """The state.json of the newest checkpoint of the run that was trained last. Runs before it may be of another
    topic."""
    newest = [
        states[-1] for run in (home / "checkpoints").glob("*/") if (states := sorted(run.glob("[0-9]*/state.json")))
    ]
    yield from sorted(newest, key=lambda path: path.stat().st_mtime)[-1:]


@dataclass(frozen=True, slots=True)
class _RunPosition:
    """The position in the rollouts topic that a checkpoint has, and the ids of the topics with the run's records."""

    run_id: str
    step: int
    plan_id: str | None
    topic_id: str
    low_water: dict[int, int]
    control_topic_ids: dict[str, str]


def _run_position(path: Path) -> _RunPosition | None:
    try:
        state = state_fields(path.read_bytes())
        topic_id = state.get("rollouts_topic_id")
        low_water = {int(partition): int(offset) for partition, offset in dict(state["low_water"]).items()}
        step, plan_id, control = int(state["step"]), state["plan_id"], state.get("control_topic_ids") or {}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the trainer names a damaged checkpoint, and falls back to the one before it
    if topic_id is None:
        return None  # of an earlier version
    if plan_id is None:
        control = {}  # the start of a run: no step is on the log
    return _RunPosition(state["run_id"], step, plan_id, topic_id, low_water, control)


def _of_run(
    settings: Settings,
    run: _RunPosition,
    identities: dict[str, TopicIdentity],
    ranges: dict[tuple[str, int], OffsetRange],
) -> str:
    lacking = _lost_control_topics(settings, run, identities)
    if lacking:
        return f"trainer, run {run.run_id}: {', '.join(lacking)} without the plan of its step {run.step}"
    there = identities.get(topics.ROLLOUTS)
    if there is not None and there.topic_id != run.topic_id:
        found = moves(settings, make_codec(settings), topics.ROLLOUTS)
        if was_moved(found, run.topic_id, there.topic_id):
            return ""  # the trainer reads it from the beginning
    losses = position_losses(topics.ROLLOUTS, run.topic_id, run.low_water, identities, ranges)
    if there is not None:
        losses = not_given_up(settings, make_codec(settings), losses, run.run_id)
    return f"trainer, run {run.run_id}: {described(losses)}" if losses else ""


def _lost_control_topics(settings: Settings, run: _RunPosition, identities: dict[str, TopicIdentity]) -> list[str]:
    """Returns a description of each changed control topic; none if the run's last plan is on the log, as after an
    import."""
    found = []
    for name, before in sorted(run.control_topic_ids.items()):
        there = identities.get(name)
        if there is None:
            found.append(f"{name} is gone")
        elif there.topic_id != before:
            found.append(f"{name} was deleted and created again")
    if not found or topics.BATCHES not in identities:
        return found
    records = records_to_end(settings, [topics.BATCHES], make_codec(settings))
    known = any(isinstance(record, BatchPlan) and record.plan_id == run.plan_id for record in records)
    return [] if known and topics.RUNS in identities else found
