"""Carries a request to forget out. Order matters: see docs/forget.md.

The request goes to the applications first, then the rollouts are swept: what the join wrote before it knew of the
request lies before the end that is read after it has committed past it, and after that it writes nothing more of them.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Forget, Record, Rollout
from tentalis.admin import KafkaAdmin
from tentalis.config import Settings
from tentalis.forget.core import COUNTED, Census, Sweep, compacted_by, gone_at
from tentalis.kafka import (
    NoSuchTopic,
    Publisher,
    Stored,
    committed_offsets,
    end_offsets,
    make_codec,
    now_ms,
    read_to_end,
)

LIVE = {topics.HALVES: ("tentalis-join",), topics.SESSIONS: ("tentalis-sessions", "tentalis-experience")}
"""Where a request is told to the applications that keep what people wrote: topic -> consumer groups that apply it.

An application that keeps records of people in a table adds its line here, takes `Forget` on that topic in its step, and
the topic's entry in schemas/topics.yaml names the record.
"""

OPTIONAL = frozenset({"tentalis-experience"})
"""Groups of LIVE that are not everywhere. One that has never run keeps nothing; what it would make the join refuses."""

CHANGELOGS = tuple(topics.changelog(f"tentalis-{app}", "state") for app in ("join", "sessions", "experience"))
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One topic of the report: records that the request concerns, what was done, by when the bytes are gone (ms)."""

    topic: str
    records: int
    done: str
    gone_by: int | None


@dataclass(slots=True)
class Report:
    """What was found and done. `husks` were written now. `waiting`: groups that have not applied the request yet, with
    the partitions. `unreadable`: records on the rollouts topic of which nobody can say whose they are."""

    request: Forget
    dry_run: bool
    rows: list[Row] = field(default_factory=list)
    husks: int = 0
    unreadable: int = 0
    waiting: dict[str, list[int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing of them can become a rollout any more."""
        return not self.waiting

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "request": self.request.model_dump(exclude_none=True),
            "dry_run": self.dry_run,
            "complete": self.complete and not self.dry_run,
            "husks": self.husks,
            "unreadable": self.unreadable,
            "waiting": self.waiting,
            "topics": [asdict(row) for row in self.rows],
        }


def forget(settings: Settings, request: Forget, *, dry_run: bool = False, wait: float = 60.0) -> Report:
    """Tells the applications, waits up to `wait` seconds until they have applied it, makes husks, counts the rest.

    Whatever was not applied in time is in the report; carrying the same request out again is harmless.
    Raises NoSuchTopic, DeliveryFailed, TimeoutError.
    """
    codec = make_codec(settings)
    report = Report(request, dry_run)
    if not dry_run:
        report.waiting = _tell(settings, codec, request, wait)
    sweep = Sweep(request)
    _sweep(settings, codec, sweep, report)
    _count(settings, codec, sweep, report)
    return report


# --- live state -------------------------------------------------------------------------------------------------------


def _tell(settings: Settings, codec: Codec, request: Forget, wait: float) -> dict[str, list[int]]:
    """Writes the request to every partition of the topics of LIVE; group -> partitions that have not applied it."""
    publisher = Publisher(settings, "tentalis-forget", codec)
    before = {topic: end_offsets(settings, topic) for topic in LIVE}
    for topic, ends in before.items():
        for partition in ends:
            publisher.send(topic, request, partition=partition)
    publisher.flush()
    told = {topic: end_offsets(settings, topic) for topic in LIVE}
    deadline = time.monotonic() + wait
    waiting = {}
    for topic, groups in LIVE.items():
        # Where nothing lies before the request, there is nothing to forget and perhaps nobody who reads.
        wanted = {p: end for p, end in told[topic].items() if before[topic].get(p, 0) > 0}
        for group in groups:
            asked = wanted
            if not _committed(settings, group, topic):
                if group in OPTIONAL:
                    continue
                # It has never run here: then only what it would make something of is a reason to wait.
                occupied = _occupied(settings, codec, topic, before[topic])
                asked = {p: end for p, end in wanted.items() if p in occupied}
            behind = _await(settings, group, topic, asked, deadline)
            # What a batch makes useless is deleted from the changelog with the one after it.
            if not behind:
                further = {p: end + 1 for p, end in _committed(settings, group, topic).items() if p in asked}
                behind = _await(settings, group, topic, further, deadline)
            if behind:
                waiting[group] = behind
    return waiting


def _occupied(settings: Settings, codec: Codec, topic: str, ends: Mapping[int, int]) -> set[int]:
    """Partitions in which something other than requests to forget lies before their ends."""
    found: set[int] = set()
    for stored in read_to_end(settings, topic, end=dict(ends)):
        if not isinstance(_readable(stored, codec), Forget):
            found.add(stored.partition)
        if len(found) == len(ends):
            break
    return found


def _await(settings: Settings, group: str, topic: str, wanted: Mapping[int, int], deadline: float) -> list[int]:
    """Waits until a group has committed so far; the partitions where it has not when the time is over."""
    while True:
        committed = _committed(settings, group, topic)
        behind = sorted(p for p, offset in wanted.items() if committed.get(p, 0) < offset)
        if not behind or time.monotonic() > deadline:
            return behind
        time.sleep(POLL_S)


def _committed(settings: Settings, group: str, topic: str) -> dict[int, int]:
    return {partition: offset for (_, partition), offset in committed_offsets(settings, group, [topic]).items()}


# --- rollouts ---------------------------------------------------------------------------------------------------------


def _sweep(settings: Settings, codec: Codec, sweep: Sweep, report: Report) -> None:
    """Reads the rollouts to their end and writes the husks that are owed; then what came meanwhile, the husks too,
    until none is owed any more."""
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
            # Where the content lies, whatever partition the key would choose: compaction works within one.
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


# --- what leaves by itself --------------------------------------------------------------------------------------------


def _count(settings: Settings, codec: Codec, sweep: Sweep, report: Report) -> None:
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
    found = KafkaAdmin(settings).current([topics.ROLLOUTS, *CHANGELOGS, *COUNTED, *letters])
    config = {name: current.config for name, current in found.items()}
    now, dry = now_ms(), report.dry_run
    done = "would become husks" if dry else "husks"
    report.rows.append(
        Row(topics.ROLLOUTS, len(sweep.matched), done, compacted_by(now, config.get(topics.ROLLOUTS, {})))
    )
    told = "would be dropped" if dry else "not dropped yet" if report.waiting else "dropped"
    report.rows += [Row(name, 0, told, compacted_by(now, config[name])) for name in CHANGELOGS if name in config]
    for topic in (*COUNTED, *letters):
        count = census.counts.get(topic)
        if count is not None:
            gone = gone_at(count.newest, config.get(topic, {}))
            report.rows.append(Row(topic, count.records, "left to retention", gone))
