"""Folds the halves log task by task with the oracle of the unit tests, without the join's code.

Tasks affect each other only through stream time. So each task can be folded alone with a clock: besides the task's own
records and the requests to forget, the oracle gets a tick wherever stream time first passes a moment at which part of
the task may end.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import Forget, Hint, Open, Outcome, Record, Rollout, Score, Tick
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Stored
from tests.chaos.findings import Findings
from tests.support.join_oracle import Oracle

MARKER_TTL_MS = 24 * 3600 * 1000
MOST_SAMPLES = 4096
"""The join's default limits (docs/concepts/join.md)."""

RecordsByKey = dict[tuple[str, str], Outcome | Rollout]
"""(topic, key) -> record"""


def folded(halves: Iterable[Stored], codec: Codec) -> RecordsByKey:
    """The expected records of rollouts and outcomes."""
    logs: dict[int, list[Stored]] = defaultdict(list)
    for stored in halves:
        logs[stored.partition].append(stored)
    found: RecordsByKey = {}
    for partition, log in logs.items():
        times = list(accumulate((stored.timestamp for stored in log), max))
        tasks: dict[str, list[tuple[int, Record]]] = defaultdict(list)
        requests: dict[int, Record] = {}
        for place, stored in enumerate(log):
            try:
                record = stored.decode(codec)
            except DecodeError:
                continue
            if isinstance(record, Forget):
                requests[place] = record
            elif not isinstance(record, Tick):
                tasks[record.key].append((place, record))
        for records in tasks.values():
            oracle = Oracle(partition, MARKER_TTL_MS, MOST_SAMPLES)
            own = dict(records)
            ticks = {place: Tick(event_time=0, partition=partition) for place in _moments(records, times)}
            at = sorted((ticks | requests | own).items())
            oracle.fold([(log[place].offset, times[place], record) for place, record in at])
            for key, record in oracle.written:
                found[topics.ROLLOUTS if isinstance(record, Rollout) else topics.OUTCOMES, key] = record
    return found


def _moments(records: list[tuple[int, Record]], times: list[int]) -> set[int]:
    """The places of records that first move stream time past a moment at which part of the task may end."""
    ends = set()
    for place, record in records:
        assert isinstance(record, Open | Score | Hint)
        terms = (record.head if isinstance(record, Open) else record.sample.head).terms
        ends |= {min(record.opened_at, times[place]) + terms.deadline_ms, times[place] + terms.opd_window_ms}
    return {place for end in ends if (place := bisect_right(times, end)) < len(times)}


def written(log: Iterable[Stored], codec: Codec) -> tuple[RecordsByKey, int, list[str]]:
    """The records of rollouts and outcomes, the number of writes, and the keys with two different records.

    Redacted rollouts are skipped: the originals are before them on the log.
    """
    values: dict[tuple[str, str], bytes] = {}
    records: RecordsByKey = {}
    writes, twice = 0, []
    for stored in log:
        assert stored.key is not None and stored.value is not None
        place = stored.topic, stored.key
        record = stored.decode(codec)
        assert isinstance(record, Outcome | Rollout)
        if isinstance(record, Rollout) and record.forgotten:
            continue
        writes += 1
        if values.setdefault(place, stored.value) != stored.value:
            twice.append(f"{stored.topic}: {stored.key}")
            continue
        if isinstance(record, Rollout) and not digest_holds(record):
            twice.append(f"{stored.topic}: {stored.key}: the digest does not match the content")
        records[place] = record
    return records, writes, twice


def _differing(found: Record, wanted: Record) -> list[str]:
    """The fields with wrong values."""
    names = [name for name in type(wanted).model_fields if getattr(found, name) != getattr(wanted, name)]
    return [f"{name} is {getattr(found, name)!r}, expected {getattr(wanted, name)!r}" for name in names]


def differences(halves: Iterable[Stored], log: Iterable[Stored], codec: Codec) -> tuple[Findings, int]:
    """Missing, unexpected and wrong outputs of the join, and the number of its writes.

    Args:
        log: rollouts and outcomes, each partition in order.
    """
    wanted = folded(halves, codec)
    found, writes, doubled = written(log, codec)
    lost = [f"{topic}: {key}" for topic, key in wanted.keys() - found.keys()]
    wrong = [f"{topic}: {key}" for topic, key in found.keys() - wanted.keys()]
    wrong += [
        f"{topic}: {key}: {', '.join(_differing(found[topic, key], record))}"
        for (topic, key), record in wanted.items()
        if found.get((topic, key), record) != record
    ]
    return Findings(sorted(lost), sorted(wrong), sorted(doubled)), writes
