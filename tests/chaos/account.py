"""What became of mutated records, by the dead letters. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from schemas import topics
from schemas.codec import DecodeError
from schemas.place import Place
from streams.placement import partition_of
from tentalis.dlq.letters import Raw, letter_of
from tests.fuzzing import CODEC, Fuzzed

GROWTH_MB = 64
"""What an application may grow by after the warm-up: allocators do not give everything back."""


def account(
    sent: Mapping[Place, Fuzzed], letters: Iterable[Raw], read: Callable[[Collection[str]], Iterable[Raw]]
) -> dict[str, Any]:
    """What became of every record.

    Args:
        sent: the mutated records by where they lie.
        letters: all dead letters.
        read: what lies on these topics.
    """
    dead: Counter[Place] = Counter()
    others: dict[Place, Raw] = {}
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
    # What the applications made of mutated records that were valid all the same, and that the next one refuses: halves
    # that contradict others, outcomes of an environment that nobody knows.
    for raw in read({place.topic for place in others}) if others else ():
        place = Place(raw.topic, raw.partition, raw.offset)
        kept = others.pop(place, raw)
        if (kept.key, kept.value) != (raw.key, raw.value):
            altered.append(f"the letter of {place}")
    altered += [f"the letter of {place}, where nothing lies" for place in others]
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
    """Whether no application may take it for a record."""
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
    """What is wrong with an account and the megabytes that each application grew by; empty if nothing is."""
    wrong = [f"{what}: {found[what]:,} records" for what in ("lost", "altered", "doubled") if found[what]]
    wrong += [f"unforeseen: {count:,} letters of {what}" for what, count in found["unforeseen"].items()]
    wrong += [
        f"{name} grew by {more:.0f} MB; the bound is {GROWTH_MB}" for name, more in grown.items() if more > GROWTH_MB
    ]
    return wrong
