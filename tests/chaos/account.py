"""Accounts for mutated records by their dead letters. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from schemas import topics
from schemas.place import RecordPlace
from schemas.wire.codec import DecodeError
from tentalis.dlq.records import RawRecord, letter_of
from tentalis.kafka.partitioner import partition_of
from tests.support.fuzzing import CODEC, Fuzzed

GROWTH_MB = 64
"""Limit of an application's memory growth after the warm-up: allocators do not return all memory."""


def account(
    sent: Mapping[RecordPlace, Fuzzed],
    letters: Iterable[RawRecord],
    read: Callable[[Collection[str]], Iterable[RawRecord]],
) -> dict[str, Any]:
    """Accounts for every record: processed, dead, lost, altered.

    Args:
        sent: the mutated records by their place.
        letters: all dead letters.
        read: reads all records of these topics.
    """
    dead: Counter[RecordPlace] = Counter()
    others: dict[RecordPlace, RawRecord] = {}
    altered: list[str] = []
    unforeseen: Counter[str] = Counter()
    for raw in letters:
        letter = letter_of(raw)
        if letter.origin is None:
            altered.append(f"{letter.place}: {letter.foreign}")
            continue
        dead[letter.origin] += 1
        record = sent.get(letter.origin)
        if record is None:
            others[letter.origin] = raw
        elif (record.key, record.value) != (raw.key, raw.value):
            altered.append(str(letter.place))
        if letter.stage not in ("decode", "validate"):
            unforeseen[f"{letter.group} {letter.error_class}: {letter.error[:120]}"] += 1
    # Outputs of the applications, from mutated records that were still valid, that a later application rejects: halves
    # that contradict others, outcomes with an unknown environment.
    for raw in read({place.topic for place in others}) if others else ():
        place = RecordPlace(raw.topic, raw.partition, raw.offset)
        kept = others.pop(place, raw)
        if (kept.key, kept.value) != (raw.key, raw.value):
            altered.append(f"the dead letter of {place}")
    altered += [f"the dead letter of {place}, where no record is" for place in others]
    lost = [place for place, record in sent.items() if place not in dead and is_invalid(record)]
    return {
        "sent": len(sent),
        "processed": len(sent.keys() - dead.keys()),
        "dead": len(sent.keys() & dead.keys()),
        "lost": len(lost),
        "altered": len(altered),
        "doubled": sum(count - 1 for count in dead.values()),
        "unforeseen": dict(unforeseen.most_common(20)),
        "damage": dict(Counter(record.damage for record in sent.values())),
        "examples": [*map(str, lost[:5]), *altered[:5]],
    }


def is_invalid(record: Fuzzed) -> bool:
    """True if no application may accept the record."""
    expected = topics.table().records_of(record.topic)
    try:
        found = CODEC.decode(record.value, topic=record.topic, partition=0, offset=0, expected=expected)
    except DecodeError:
        return True
    key = found.key.encode("utf-8", "surrogateescape")
    if key != record.key:
        return True
    paired = record.topic in (topics.RESULTS, topics.FEEDBACK)
    return paired and partition_of(key, topics.table()[record.topic].partitions) != record.partition


def reasons(found: Mapping[str, Any], grown: Mapping[str, float]) -> list[str]:
    """The reasons why a run failed, from its account and the growth of each application in MB; empty if it passed."""
    wrong = [f"{what}: {found[what]:,} records" for what in ("lost", "altered", "doubled") if found[what]]
    wrong += [f"unforeseen: {count:,} dead letters of {what}" for what, count in found["unforeseen"].items()]
    wrong += [
        f"{name} grew by {more:.0f} MB; the limit is {GROWTH_MB}" for name, more in grown.items() if more > GROWTH_MB
    ]
    return wrong
