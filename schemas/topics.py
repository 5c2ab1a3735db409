"""The table of topics (topics.yaml), read once and resolved: dead-letter topics included.

`tentalis.kafka.topology.topic_table` adds the changelogs of the applications.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from schemas.keyed_partitions import keyed_partitions
from schemas.namespace import PRODUCT, prefix_of

PREFIX = prefix_of(os.environ)
"""The beginning of the names of this process; see `schemas.namespace`."""

TASKS = f"{PREFIX}.tasks.v1"
RESULTS = f"{PREFIX}.results.v1"
FEEDBACK = f"{PREFIX}.feedback.v1"
HALVES = f"{PREFIX}.halves.v1"
OUTCOMES = f"{PREFIX}.outcomes.v1"
ROLLOUTS = f"{PREFIX}.rollouts.v1"
RUNS = f"{PREFIX}.runs.v1"
BATCHES = f"{PREFIX}.batches.v1"
POLICIES = f"{PREFIX}.policies.v1"
POLICY_ACKS = f"{PREFIX}.policy-acks.v1"
SESSIONS = f"{PREFIX}.sessions.v1"
SKILLS = f"{PREFIX}.skills.v1"
META = f"{PREFIX}.meta.v1"
EVALS = f"{PREFIX}.evals.v1"
AUDIT = f"{PREFIX}.audit.v1"
SCHEMAS = f"{PREFIX}.schemas.v1"
TOPIC_IDS = f"{PREFIX}.topic-ids.v1"
CONTROL = (RUNS, BATCHES, POLICIES, POLICY_ACKS)

# `max.message.bytes` counts a whole batch: this is room for key, headers and framing beside a value of the full size.
# A dead letter adds its own headers to the original bytes, so its topic allows this much more again.
OVERHEAD_BYTES = 65536
DLQ_RETENTION_MS = 30 * 24 * 3600 * 1000
CHANGELOG_MIN_LAG_MS = 3600 * 1000
CHANGELOG_MAX_LAG_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic as it should be on the broker."""

    name: str
    records: tuple[str, ...]
    partitions: int
    config: dict[str, str]


@dataclass(frozen=True, slots=True)
class TopicTable:
    """All topics, and the size limit (bytes of one record) and the `common` settings that they share.

    `co_partitioned`: the topics with `keyed_partitions` partitions, the changelogs aside.
    """

    topics: dict[str, Topic]
    record_limit_bytes: int
    keyed_partitions: int
    common: dict[str, str] = field(default_factory=dict)
    co_partitioned: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Topic:
        return self.topics[name]

    def records_of(self, name: str) -> tuple[str, ...]:
        """Record names that a topic may hold. Raises KeyError for a topic that is not ours."""
        return self.topics[name].records


def dlq(topic: str) -> str:
    """The dead-letter topic of a topic."""
    return f"{topic}.dlq"


def changelog(app: str, table: str) -> str:
    """The changelog topic of a table of an application."""
    return f"{app}-{table}-changelog"


def _resolve(raw: dict[str, Any]) -> TopicTable:
    defaults = raw["defaults"]
    keyed = keyed_partitions(os.environ, int(defaults["keyed_partitions"]))
    limit = int(defaults["record_limit_bytes"])
    common = {"max.message.bytes": str(limit + OVERHEAD_BYTES), "compression.type": str(defaults["compression"])}
    topics: dict[str, Topic] = {}
    co_partitioned: list[str] = []

    def add(name: str, records: tuple[str, ...], partitions: int, config: dict[str, str]) -> None:
        topics[name] = Topic(name, records, partitions, common | config)

    for plain, entry in raw["topics"].items():
        name = PREFIX + plain.removeprefix(PRODUCT)
        partitions = keyed if entry["partitions"] == "keyed" else int(entry["partitions"])
        add(name, tuple(entry["records"]), partitions, {key: str(value) for key, value in entry["config"].items()})
        if entry.get("dlq"):
            config = {"cleanup.policy": "delete", "retention.ms": str(DLQ_RETENTION_MS)}
            add(dlq(name), (), partitions, config | {"max.message.bytes": str(limit + 2 * OVERHEAD_BYTES)})
        if entry["partitions"] == "keyed":
            co_partitioned += [name, dlq(name)] if entry.get("dlq") else [name]
    return TopicTable(topics, limit, keyed, common, tuple(co_partitioned))


def with_changelogs(table: TopicTable, names: Iterable[str]) -> TopicTable:
    """Returns the table with these changelog topics added. Changelogs are only compacted, and not within the first
    hour after a write, so that a recovery still sees a late write of a worker that was replaced.
    `max.compaction.lag.ms`: erased data leaves the disk within this time, even on a quiet topic."""
    config = {
        "cleanup.policy": "compact",
        "min.compaction.lag.ms": str(CHANGELOG_MIN_LAG_MS),
        "max.compaction.lag.ms": str(CHANGELOG_MAX_LAG_MS),
    }
    changelogs = {name: Topic(name, (), table.keyed_partitions, table.common | config) for name in names}
    return replace(table, topics=table.topics | changelogs)


@cache
def table() -> TopicTable:
    """The table that this version of the code ships."""
    import yaml  # here: the help of `tentalis serve` needs the names of topics, not the table

    return _resolve(yaml.safe_load((Path(__file__).parent / "topics.yaml").read_text(encoding="utf-8")))
