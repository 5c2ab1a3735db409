"""What the halves log says, folded task by task by the oracle of the unit tests: no code of the join in it.

Tasks touch each other only through stream time. So each task can be folded alone, if the clock is told: besides the
task's own records the oracle gets a tick wherever stream time first passes a moment at which the task may be over.
"""

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from typing import Any

from schemas import topics
from schemas.codec import DecodeError
from schemas.digest import digest_holds
from schemas.records import Hint, Open, Outcome, Record, Rollout, Score, Tick
from streams.join.core import Limits
from tentalis.config import Settings
from tentalis.kafka import Stored, make_codec, read_to_end
from tests.unit.join_oracle import Oracle, told

Facts = dict[tuple[str, str], Any]
"""(topic, key) -> what is written under it"""


def folded(settings: Settings) -> Facts:
    """What must be on rollouts and outcomes."""
    codec, limits = make_codec(settings), Limits()
    logs: dict[int, list[Stored]] = defaultdict(list)
    for stored in read_to_end(settings, topics.HALVES):
        logs[stored.partition].append(stored)
    facts: Facts = {}
    for partition, log in logs.items():
        times = list(accumulate((stored.timestamp for stored in log), max))
        tasks: dict[str, list[tuple[int, Record]]] = defaultdict(list)
        for place, stored in enumerate(log):
            try:
                record = stored.decode(codec)
            except DecodeError:
                continue
            if not isinstance(record, Tick):
                tasks[record.key].append((place, record))
        for records in tasks.values():
            oracle = Oracle(partition, limits.marker_ttl_ms, limits.max_samples)
            own = {place: record for place, record in records}
            ticks = {place: Tick(event_time=0, partition=partition) for place in _moments(records, times)}
            at = sorted((ticks | own).items())
            oracle.fold([(log[place].offset, times[place], record) for place, record in at])
            for key, fact in oracle.written:
                facts[topics.ROLLOUTS if fact[0] == "rollout" else topics.OUTCOMES, key] = fact
    return facts


def _moments(records: list[tuple[int, Record]], times: list[int]) -> set[int]:
    """Places of the records that first move stream time past any moment at which something of a task may end."""
    ends = set()
    for place, record in records:
        assert isinstance(record, Open | Score | Hint)
        terms = (record.head if isinstance(record, Open) else record.sample.head).terms
        ends |= {min(record.opened_at, times[place]) + terms.deadline_ms, times[place] + terms.opd_window_ms}
    return {place for end in ends if (place := bisect_right(times, end)) < len(times)}


def written(settings: Settings) -> tuple[Facts, int, list[str]]:
    """What is on rollouts and outcomes, how many writes it took, and the keys under which two different things lie."""
    codec = make_codec(settings)
    values: dict[tuple[str, str], bytes] = {}
    facts: Facts = {}
    writes, twice = 0, []
    for topic in (topics.ROLLOUTS, topics.OUTCOMES):
        for stored in read_to_end(settings, topic):
            assert stored.key is not None and stored.value is not None
            writes += 1
            place = topic, stored.key
            if values.setdefault(place, stored.value) != stored.value:
                twice.append(f"{topic}: {stored.key}")
                continue
            record = stored.decode(codec)
            assert isinstance(record, Outcome | Rollout)
            if isinstance(record, Rollout) and not digest_holds(record):
                twice.append(f"{topic}: {stored.key}: not what its digest covers")
            facts[place] = told(stored.key, record)[1]
    return facts, writes, twice


def differences(settings: Settings) -> tuple[list[str], list[str], list[str], int]:
    """(lost, wrong, doubled, writes): keys that are missing; keys that say something else, or should not be there."""
    wanted = folded(settings)
    found, writes, doubled = written(settings)
    lost = [f"{topic}: {key}" for topic, key in wanted.keys() - found.keys()]
    wrong = [f"{topic}: {key}" for topic, key in found.keys() - wanted.keys()]
    wrong += [
        f"{topic}: {key}: {found[topic, key]} where the log says {fact}"
        for (topic, key), fact in wanted.items()
        if found.get((topic, key), fact) != fact
    ]
    return sorted(lost), sorted(wrong), sorted(doubled), writes
