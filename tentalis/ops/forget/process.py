"""Carries out a request to forget. The order of the steps matters: see docs/operations/forget.md.

1. Send the request to the applications and wait until they have committed past it. After that the join writes no more
   rollouts that the request concerns.
2. Read the rollouts topic to its end, which includes all that the join wrote before, and redact these rollouts.
3. Count the records on the other topics, which retention deletes.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from schemas import topics
from schemas.records import Forget, Record, Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka import topology
from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.ops.forget.core import COUNTED, Census, Sweep, compacted_by, gone_at
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One topic of the report: the number of records that the request concerns, the action taken, and the time (ms) by
    which the bytes are removed."""

    topic: str
    records: int
    done: str
    gone_by: int | None


@dataclass(slots=True)
class ForgetReport:
    """The result of a request. `husks`: number of rollouts redacted now. `waiting`: groups that have not applied the
    request yet, with the partitions. `unreadable`: number of undecodable records on the rollouts topic, whose user is
    unknown."""

    request: Forget
    dry_run: bool
    rows: list[Row] = field(default_factory=list)
    husks: int = 0
    unreadable: int = 0
    waiting: dict[str, list[int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if no more data that the request concerns can become a rollout."""
        return not self.waiting

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return {
            "request": self.request.model_dump(exclude_none=True),
            "dry_run": self.dry_run,
            "complete": self.complete and not self.dry_run,
            "husks": self.husks,
            "unreadable": self.unreadable,
            "waiting": self.waiting,
            "topics": [asdict(row) for row in self.rows],
        }


def forget(settings: Settings, request: Forget, *, dry_run: bool = False, wait: float = 60.0) -> ForgetReport:
    """Sends the request, waits up to `wait` seconds until it is applied, redacts the rollouts and counts the rest.

    The report has the groups that did not apply the request in time. Carrying out the same request again is harmless.
    Raises NoSuchTopic, DeliveryFailed, TimeoutError.
    """
    codec = make_codec(settings)
    report = ForgetReport(request, dry_run)
    if not dry_run:
        report.waiting = _tell(settings, codec, request, wait)
    sweep = Sweep(request)
    _sweep(settings, codec, sweep, report)
    _count(settings, codec, sweep, report)
    return report


# --- live state -------------------------------------------------------------------------------------------------------


def _tell(settings: Settings, codec: Codec, request: Forget, wait: float) -> dict[str, list[int]]:
    """Writes the request to every partition of the topics that carry it to the applications with people's records.

    Returns the consumer groups that have not applied it in time, with the partitions. Skips an optional application
    that has never run: it stores nothing, and the join rejects what it would make.
    """
    publisher = Publisher(settings, "tentalis-forget", codec)
    live = topology.personal()
    before = {topic: end_offsets(settings, topic) for topic in live}
    for topic, ends in before.items():
        for partition in ends:
            publisher.send(topic, request, partition=partition)
    publisher.flush()
    told = {topic: end_offsets(settings, topic) for topic in live}
    deadline = time.monotonic() + wait
    waiting = {}
    for topic, applications in live.items():
        # A partition without earlier records has nothing to forget, and perhaps no consumer.
        wanted = {p: end for p, end in told[topic].items() if before[topic].get(p, 0) > 0}
        for application in applications:
            group, asked = application.consumer_group(), wanted
            if not _committed(settings, group, topic):
                if application.optional:
                    continue
                # The group has never run here: wait only for partitions with records that it would process.
                occupied = _occupied(settings, codec, topic, before[topic])
                asked = {p: end for p, end in wanted.items() if p in occupied}
            behind = _await(settings, group, topic, asked, deadline)
            # Changelog entries that a batch makes obsolete are deleted with the next batch.
            if not behind:
                further = {p: end + 1 for p, end in _committed(settings, group, topic).items() if p in asked}
                behind = _await(settings, group, topic, further, deadline)
            if behind:
                waiting[group] = behind
    return waiting


def _occupied(settings: Settings, codec: Codec, topic: str, ends: Mapping[int, int]) -> set[int]:
    """Returns the partitions that have records other than requests to forget before their ends."""
    found: set[int] = set()
    for stored in read_to_end(settings, topic, end=dict(ends)):
        if not isinstance(_readable(stored, codec), Forget):
            found.add(stored.partition)
        if len(found) == len(ends):
            break
    return found


def _await(settings: Settings, group: str, topic: str, wanted: Mapping[int, int], deadline: float) -> list[int]:
    """Waits until a group has committed the wanted offsets; returns the partitions where it has not by the deadline."""
    while True:
        committed = _committed(settings, group, topic)
        behind = sorted(p for p, offset in wanted.items() if committed.get(p, 0) < offset)
        if not behind or time.monotonic() > deadline:
            return behind
        time.sleep(POLL_S)


def _committed(settings: Settings, group: str, topic: str) -> dict[int, int]:
    return {partition: offset for (_, partition), offset in committed_offsets(settings, group, [topic]).items()}


# --- rollouts ---------------------------------------------------------------------------------------------------------


def _sweep(settings: Settings, codec: Codec, sweep: Sweep, report: ForgetReport) -> None:
    """Reads the rollouts topic to its end and writes the redacted rollouts that are due.

    Then it reads the records that arrived meanwhile, including its own, and repeats until none is due.
    """
    publisher = Publisher(settings, "tentalis-forget", codec)
    start: dict[int, int] = {}
    while True:
        ends = end_offsets(settings, topics.ROLLOUTS)
        for stored in read_to_end(settings, topics.ROLLOUTS, start=start, end=ends):
            record = _readable(stored, codec)
            if isinstance(record, Rollout):
                sweep.take(stored.partition, record)
            elif stored.value is not None:
                report.unreadable += 1
        if not sweep.owed or report.dry_run:
            return
        for (partition, _), left in sweep.owed.items():
            # Write to the partition of the content, whatever the key's partition: compaction works per partition.
            publisher.send(topics.ROLLOUTS, left, partition=partition)
        publisher.flush()
        report.husks += len(sweep.owed)
        start = ends


def _readable(stored: Stored, codec: Codec) -> Record | None:
    if stored.value is None:
        return None
    try:
        return stored.decode(codec)
    except DecodeError:
        return None


# --- topics left to retention -----------------------------------------------------------------------------------------


def personal_changelogs() -> list[str]:
    """Returns the changelogs from which the applications with people's records delete what a request concerns."""
    found = (name for applications in topology.personal().values() for each in applications for name in each.changelogs)
    return list(dict.fromkeys(found))


def _count(settings: Settings, codec: Codec, sweep: Sweep, report: ForgetReport) -> None:
    census = Census(report.request, tasks=set(sweep.tasks))
    for topic in COUNTED:
        for stored in read_to_end(settings, topic):
            record = _readable(stored, codec)
            if record is not None:
                census.take(topic, record, stored.timestamp)
    letters = [topics.dlq(topic) for topic in (*COUNTED, topics.ROLLOUTS)]
    for topic in letters:
        try:
            for stored in read_to_end(settings, topic):
                census.letter(topic, stored.key, stored.timestamp)
        except NoSuchTopic:
            continue  # nothing was ever dead-lettered here
    changelogs = personal_changelogs()
    found = KafkaAdmin(settings).current([topics.ROLLOUTS, *changelogs, *COUNTED, *letters])
    config = {name: current.config for name, current in found.items()}
    now, dry = now_ms(), report.dry_run
    done = "would be redacted" if dry else "redacted"
    report.rows.append(
        Row(topics.ROLLOUTS, len(sweep.matched), done, compacted_by(now, config.get(topics.ROLLOUTS, {})))
    )
    told = "would be dropped" if dry else "not dropped yet" if report.waiting else "dropped"
    report.rows += [Row(name, 0, told, compacted_by(now, config[name])) for name in changelogs if name in config]
    for topic in (*COUNTED, *letters):
        count = census.counts.get(topic)
        if count is not None:
            gone = gone_at(count.newest, config.get(topic, {}))
            report.rows.append(Row(topic, count.records, "left to retention", gone))
