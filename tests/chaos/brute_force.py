"""What the halves log says, folded task by task by the oracle of the unit tests: no code of the join in it.

Tasks touch each other only through stream time. So each task can be folded alone, if the clock is told: besides the
task's own records and the requests to forget the oracle gets a tick wherever stream time first passes a moment at which
the task may be over.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.digest import digest_holds
from schemas.records import Forget, Hint, Open, Outcome, Record, Rollout, Score, Tick
from tentalis.kafka import Stored
from tests.chaos.findings import Findings
from tests.unit.join_oracle import Oracle

MARKER_TTL_MS = 24 * 3600 * 1000
MOST_SAMPLES = 4096
"""What docs/join.md promises of a join that was given no other limits."""

Facts = dict[tuple[str, str], Outcome | Rollout]
"""(topic, key) -> what is written under it"""


def folded(halves: Iterable[Stored], codec: Codec) -> Facts:
    """What must be on rollouts and outcomes."""
    logs: dict[int, list[Stored]] = defaultdict(list)
    for stored in halves:
        logs[stored.partition].append(stored)
    facts: Facts = {}
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
            for key, fact in oracle.written:
                facts[topics.ROLLOUTS if isinstance(fact, Rollout) else topics.OUTCOMES, key] = fact
    return facts


def _moments(records: list[tuple[int, Record]], times: list[int]) -> set[int]:
    """Places of the records that first move stream time past any moment at which something of a task may end."""
    ends = set()
    for place, record in records:
        assert isinstance(record, Open | Score | Hint)
        terms = (record.head if isinstance(record, Open) else record.sample.head).terms
        ends |= {min(record.opened_at, times[place]) + terms.deadline_ms, times[place] + terms.opd_window_ms}
    return {place for end in ends if (place := bisect_right(times, end)) < len(times)}


def written(log: Iterable[Stored], codec: Codec) -> tuple[Facts, int, list[str]]:
    """What is on rollouts and outcomes, how many writes it took, and the keys under which two different things lie.

    Husks say what was there and no more: what they stand for lies before them, and is still to be read.
    """
    values: dict[tuple[str, str], bytes] = {}
    facts: Facts = {}
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
            twice.append(f"{stored.topic}: {stored.key}: not what its digest covers")
        facts[place] = record
    return facts, writes, twice


def _differing(found: Record, wanted: Record) -> list[str]:
    """The fields that are not what they must be."""
    names = [name for name in type(wanted).model_fields if getattr(found, name) != getattr(wanted, name)]
    return [f"{name} {getattr(found, name)!r} where the log says {getattr(wanted, name)!r}" for name in names]


def differences(halves: Iterable[Stored], log: Iterable[Stored], codec: Codec) -> tuple[Findings, int]:
    """What the join should have written and has not, or has written and should not have; and how many writes it took.

    Args:
        log: rollouts and outcomes, each partition in its order.
    """
    wanted = folded(halves, codec)
    found, writes, doubled = written(log, codec)
    lost = [f"{topic}: {key}" for topic, key in wanted.keys() - found.keys()]
    wrong = [f"{topic}: {key}" for topic, key in found.keys() - wanted.keys()]
    wrong += [
        f"{topic}: {key}: {', '.join(_differing(found[topic, key], fact))}"
        for (topic, key), fact in wanted.items()
        if found.get((topic, key), fact) != fact
    ]
    return Findings(sorted(lost), sorted(wrong), sorted(doubled)), writes
