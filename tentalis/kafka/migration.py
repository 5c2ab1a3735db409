"""Classifies the changes of a plan by what they can do to records: safe, for a person to decide, or refused. Pure.

A change needs a person if Kafka may remove records, or refuse larger ones, that it keeps or accepts now.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from tentalis.kafka.admin import Change, ChangeKind

# Settings of which a smaller value keeps or accepts less. -1 stands for no limit.
LIMITS = frozenset(
    {"retention.ms", "retention.bytes", "max.message.bytes", "min.compaction.lag.ms", "max.compaction.lag.ms"}
)
CLEANUP = "cleanup.policy"


class Risk(StrEnum):
    """The class of a change."""

    SAFE = "safe"
    PERSON = "needs a person"
    REFUSED = "refused"


def risk_of(change: Change) -> Risk:
    """Returns the class of a change."""
    if change.kind is ChangeKind.IMPOSSIBLE:
        return Risk.REFUSED
    if change.kind is ChangeKind.CREATE:
        return Risk.SAFE
    return Risk.PERSON if dangers(change) else Risk.SAFE


def dangers(change: Change) -> list[str]:
    """Returns the settings of an existing topic whose new value may lose records."""
    if change.kind is not ChangeKind.UPDATE:
        return []
    return [name for name, (old, new) in change.config.items() if _may_lose(name, old, new)]


def of_risk(changes: Iterable[Change], risk: Risk) -> list[Change]:
    """Returns the changes of one class."""
    return [change for change in changes if risk_of(change) is risk]


def _may_lose(name: str, old: str | None, new: str) -> bool:
    if name == CLEANUP:
        return old is None or not _parts(new) <= _parts(old)
    return name in LIMITS and (old is None or _limit(new) < _limit(old))


def _parts(policy: str) -> set[str]:
    return {part.strip() for part in policy.split(",")}


def _limit(value: str) -> float:
    number = float(value)
    return float("inf") if number < 0 else number
