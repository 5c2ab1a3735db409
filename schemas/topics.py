"""The table of topics (topics.yaml), read once and resolved: changelogs and dead-letter topics included."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TASKS = "tentalis.tasks.v1"
RESULTS = "tentalis.results.v1"
FEEDBACK = "tentalis.feedback.v1"
HALVES = "tentalis.halves.v1"
OUTCOMES = "tentalis.outcomes.v1"
ROLLOUTS = "tentalis.rollouts.v1"
RUNS = "tentalis.runs.v1"
BATCHES = "tentalis.batches.v1"
POLICIES = "tentalis.policies.v1"
POLICY_ACKS = "tentalis.policy-acks.v1"
SESSIONS = "tentalis.sessions.v1"
SKILLS = "tentalis.skills.v1"
META = "tentalis.meta.v1"
EVALS = "tentalis.evals.v1"
AUDIT = "tentalis.audit.v1"
SCHEMAS = "tentalis.schemas.v1"
CONTROL = (RUNS, BATCHES, POLICIES, POLICY_ACKS)

# `max.message.bytes` counts a whole batch: room for key, headers and framing beside a value of the full size. A dead
# letter has the original's bytes and headers of its own, so its topic takes a little more again.
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
    """Every topic, and the one size limit (bytes of one record) that all of them share."""

    topics: dict[str, Topic]
    record_limit_bytes: int
    keyed_partitions: int

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
    keyed, limit = int(defaults["keyed_partitions"]), int(defaults["record_limit_bytes"])
    common = {"max.message.bytes": str(limit + OVERHEAD_BYTES), "compression.type": str(defaults["compression"])}
    topics: dict[str, Topic] = {}

    def add(name: str, records: tuple[str, ...], partitions: int, config: dict[str, str]) -> None:
        topics[name] = Topic(name, records, partitions, common | config)

    for name, entry in raw["topics"].items():
        partitions = keyed if entry["partitions"] == "keyed" else int(entry["partitions"])
        add(name, tuple(entry["records"]), partitions, {key: str(value) for key, value in entry["config"].items()})
        if entry.get("dlq"):
            config = {"cleanup.policy": "delete", "retention.ms": str(DLQ_RETENTION_MS)}
            add(dlq(name), (), partitions, config | {"max.message.bytes": str(limit + 2 * OVERHEAD_BYTES)})
    for entry in raw["changelogs"]:
        lags = {
            "min.compaction.lag.ms": str(CHANGELOG_MIN_LAG_MS),
            "max.compaction.lag.ms": str(CHANGELOG_MAX_LAG_MS),
        }
        config = {"cleanup.policy": "compact"} | lags
        add(changelog(entry["app"], entry["table"]), (), keyed, config)
    return TopicTable(topics, limit, keyed)


@cache
def table() -> TopicTable:
    """The table that this version of the code ships."""
    return _resolve(yaml.safe_load((Path(__file__).parent / "topics.yaml").read_text(encoding="utf-8")))
