"""Counts the records that came to topics within a time."""

from __future__ import annotations

from collections.abc import Collection

from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.offsets import end_offsets, offsets_at
from tentalis.service.settings import Settings


def produce_rates(settings: Settings, names: Collection[str], since_ms: int) -> dict[str, int]:
    """Returns the number of offsets since a time by topic, the busiest first. Without `names`, all topics to which a
    record came. Raises NoSuchTopic."""
    found = {}
    for name in names or KafkaAdmin(settings).names():
        ends, begins = end_offsets(settings, name), offsets_at(settings, name, since_ms)
        found[name] = sum(ends[p] - begin for p in ends if (begin := begins.get(p)) is not None)
    return {name: count for name, count in sorted(found.items(), key=lambda item: -item[1]) if count or names}
