"""Calculates what a load needs: workers, partitions, broker throughput, storage, state, and tokens per second. Pure.

All figures per task are those of docs/operations/scale.md, measured with samples of 1,000 tokens, the gateway's aside.
Sizes grow with the tokens; CPU per task is taken as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from schemas import topics
from tentalis.kafka.topology import APPLICATIONS

MEASURED_TOKENS = 1000
HEAD_KB = 0.1
"""The part of a record that does not grow with the tokens."""
JOIN_S = 374e-6
SCORING_S = 290e-6
"""CPU seconds per task of the join, and per result of scoring by rule."""
GATEWAY_S = 1 / 413
"""CPU seconds of the gateway per recorded call that is not streamed: each task is taken as one such call."""
MOST_BUSY = 0.6
"""Highest load of a worker, so that the others can take over for one that is down."""
PARTITIONS = (8, 12, 24, 48, 96, 192, 384, 768)
"""Partition counts that divide well."""
RECORD_KB = {
    topics.TASKS: 0.1,
    topics.RESULTS: 12.2,
    topics.FEEDBACK: 12.3,
    topics.OUTCOMES: 0.4,
}
SCORE_KB, HINT_KB, NO_HINT_KB = 9.8, 14.1, 0.3
ROLLOUT_KB, HINTED_ROLLOUT_KB = 10.0, 14.0
CHANGELOG_KB = 4.3
OPEN_KB = 18.0
CLOSED_KB, CLOSED_DISK_KB = 0.6, 0.143
"""Resident memory of a task that waits and of one that is remembered; and of the latter on disk (`--state rocksdb`)."""
HINT_TOKENS = 60
"""Tokens that a hint adds to the teacher's prompt."""
DAY_S = 86_400
READ_PER_WRITTEN = 2
"""How often a record is read, about. It leaves a broker once more for each replica beside the leader's."""
MOST_REPLICAS = 32
"""More brokers than a partition is ever copied to."""
LARGEST = 1e12
"""The largest number of a load."""
CHANGELOG = "join changelog"


class BadLoad(ValueError):
    """A load that cannot be calculated. The message names the value."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load. `hints`: share of the tasks with an accepted hint. `wait_s`: how long a task waits for its hint.
    `remember_h`: hours for which a closed task is remembered (`--marker-ttl`)."""

    tasks_per_second: float
    tokens: int = MEASURED_TOKENS
    hints: float = 0.5
    wait_s: float = 30.0
    remember_h: float = 24.0
    replicas: int = 3

    def __post_init__(self) -> None:
        values = {
            "the number of tasks per second": self.tasks_per_second,
            "the number of tokens": self.tokens,
            "the share of hints": self.hints,
            "the wait for a hint": self.wait_s,
            "the time for which a closed task is remembered": self.remember_h,
            "the number of replicas": self.replicas,
        }
        for what, value in values.items():
            if not abs(value) <= LARGEST:  # false for NaN too
                raise BadLoad(f"{what} is {value}: give a number up to {LARGEST:.0e}")
        if not self.tasks_per_second > 0 or self.tokens < 1:
            raise BadLoad("tasks per second and tokens must be above 0")
        if not 0 <= self.hints <= 1:
            raise BadLoad(f"the share of hints is {self.hints}: give a number from 0 to 1")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise BadLoad(f"the number of replicas is {self.replicas}: give a number from 1 to {MOST_REPLICAS}")


@dataclass(frozen=True, slots=True)
class TopicSize:
    """Throughput and storage of a topic, before replication. `days` None: compacted, or kept until forgotten."""

    topic: str
    kb_per_task: float
    mb_per_second: float
    days: float | None
    tb: float | None


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer to a load: `applications` and `totals` as names with numbers, `topics` by throughput."""

    applications: Mapping[str, Mapping[str, float]]
    partitions: int
    topics: tuple[TopicSize, ...]
    totals: Mapping[str, float]

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The applications whose cost per task nobody measured: their numbers are not calculated."""
        return tuple(each.name for each in APPLICATIONS if each.name not in self.applications)

    def as_dict(self) -> dict[str, Any]:
        """The sizing as JSON values."""
        return {
            "partitions": self.partitions,
            "applications": {name: dict(values) for name, values in self.applications.items()},
            "not_measured": list(self.not_measured),
            "topics": [
                {
                    "topic": t.topic,
                    "kb_per_task": t.kb_per_task,
                    "mb_per_second": t.mb_per_second,
                    "days": t.days,
                    "tb": t.tb,
                }
                for t in self.topics
            ],
            "totals": dict(self.totals),
        }


def _processes(cores: float) -> dict[str, float]:
    """Returns the busy cores, the single-threaded processes for them, and how busy each is."""
    workers = workers_for(cores)
    return {"cores": cores, "workers": workers, "busy": cores / workers}


def workers_for(cores: float) -> int:
    """Returns the number of single-threaded workers for so many busy cores."""
    return max(1, ceil(cores / MOST_BUSY))


def partitions_for(workers: int) -> int:
    """Returns the partitions for the busiest application: at least twice its workers. Raises BadLoad."""
    found = next((count for count in PARTITIONS if count >= 2 * workers), None)
    if found is None:
        raise BadLoad(
            f"the busiest application needs {workers} workers; there are no measurements for more than "
            f"{PARTITIONS[-1]} partitions"
        )
    return found


def _scaled(kb: float, tokens: int) -> float:
    return HEAD_KB + (kb - HEAD_KB) * tokens / MEASURED_TOKENS if kb > 1 else kb


def size_of(load: Load) -> Sizing:
    """Returns what the load needs. Raises BadLoad."""
    rate = load.tasks_per_second
    join_cores, scoring_cores = rate * JOIN_S, rate * SCORING_S
    partitions = partitions_for(workers_for(max(join_cores, scoring_cores)))
    join_workers = next(n for n in range(workers_for(join_cores), partitions + 1) if partitions % n == 0)
    sizes = _topic_sizes(load)
    written = sum(each.mb_per_second for each in sizes)
    open_gb = rate * load.wait_s * _scaled(OPEN_KB, load.tokens) / 1e6
    closed = rate * load.remember_h * 3600
    return Sizing(
        applications={
            "join": {"cores": join_cores, "workers": join_workers, "busy": join_cores / join_workers},
            "scoring": _processes(scoring_cores),
            "gateway": _processes(rate * GATEWAY_S),
        },
        partitions=partitions,
        topics=sizes,
        totals={
            "broker_in_mb_per_second": written,
            "broker_written_mb_per_second": written * load.replicas,
            "broker_sent_mb_per_second": written * (READ_PER_WRITTEN + load.replicas - 1),
            "storage_tb_replicated": load.replicas * sum(each.tb or 0.0 for each in sizes),
            "join_open_gb": open_gb,
            "join_closed_gb_in_memory": closed * CLOSED_KB / 1e6,
            "join_closed_gb_on_disk": closed * CLOSED_DISK_KB / 1e6,
            "join_open_gb_per_worker": open_gb / join_workers,
            "teacher_tokens_per_second": rate * load.hints * (load.tokens + HINT_TOKENS),
            "trainer_tokens_per_second": rate * load.tokens,
        },
    )


def _topic_sizes(load: Load) -> tuple[TopicSize, ...]:
    hinted, plain = load.hints, 1 - load.hints

    def scaled(kb: float) -> float:
        return _scaled(kb, load.tokens)

    per_task = {name: scaled(kb) for name, kb in RECORD_KB.items()} | {
        topics.HALVES: scaled(SCORE_KB) + hinted * scaled(HINT_KB) + plain * scaled(NO_HINT_KB),
        topics.ROLLOUTS: hinted * scaled(HINTED_ROLLOUT_KB) + plain * scaled(ROLLOUT_KB),
        CHANGELOG: scaled(CHANGELOG_KB),
    }
    found = []
    for name, kb in per_task.items():
        mb = kb * load.tasks_per_second / 1000
        days = _days_kept(name)
        found.append(TopicSize(name, kb, mb, days, None if days is None else mb * days * DAY_S / 1e6))
    return tuple(sorted(found, key=lambda each: -each.mb_per_second))


def _days_kept(name: str) -> float | None:
    known = topics.table().topics.get(name)
    retention = None if known is None else known.config.get("retention.ms")
    return None if retention is None else int(retention) / 1000 / DAY_S
