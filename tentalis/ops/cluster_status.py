"""The state of a deployment by its cluster alone: topics, applications and what is served, wherever they run."""

from __future__ import annotations

from dataclasses import dataclass

from tentalis.kafka import topology
from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.topology import InStack, topic_table
from tentalis.ops.groups.core import GroupLag, is_of_one_worker
from tentalis.ops.groups.process import read_groups
from tentalis.policies.view_reader import read_policies
from tentalis.service.settings import Settings

WORKING, IDLE, ABSENT, REPLACED = "working", "no member", "absent", "replaced"


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """An application by its consumer group. `needed`: the loop stands still without it. `state` is `replaced` for the
    own group of a worker that is gone: nobody reads its records, which the others answer."""

    application: str
    group: str
    state: str
    members: int
    records: int | None
    needed: bool

    @property
    def in_trouble(self) -> bool:
        """True if the loop needs it and nobody does its work."""
        return self.needed and self.state != WORKING


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The promoted version of a policy, and the model servers that acknowledged it last."""

    version: str
    run: str
    step: int
    served_by: str | None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The records of a deployment on a cluster. Without all its topics, nothing else is read."""

    bootstrap: str
    missing_topics: list[str]
    applications: list[ApplicationStatus]
    policies: list[ServedPolicy]

    @property
    def in_trouble(self) -> bool:
        """True if a topic is missing, an application that the loop needs has no member, or a version is not served."""
        return bool(self.missing_topics) or any(
            (*(each.in_trouble for each in self.applications), *(each.served_by is None for each in self.policies))
        )


def read_cluster(settings: Settings) -> ClusterStatus:
    """Reads the state of the deployment on a cluster. Raises Unreachable, Forbidden, KafkaException."""
    there = set(KafkaAdmin(settings).names())
    missing = sorted({*topic_table().topics} - there)
    if missing:
        return ClusterStatus(settings.require_bootstrap(), missing, [], [])
    lags = [lag for lag in read_groups(settings) if lag.application]
    names = [lag.group.name for lag in lags]
    groups = [application_status(lag, one_worker=is_of_one_worker(lag.group.name, names)) for lag in lags]
    rows = [row for row in read_policies(settings).rows(None, 0) if row["state"] == "promoted"]
    served = [ServedPolicy(row["version"], row["run"], row["step"], row["served_by"]) for row in rows]
    return ClusterStatus(settings.require_bootstrap(), [], groups, served)


def application_status(lag: GroupLag, *, one_worker: bool = False) -> ApplicationStatus:
    """Returns the state of an application by its group. `one_worker`: see `is_of_one_worker`."""
    state = WORKING if lag.active else REPLACED if one_worker else IDLE if lag.started else ABSENT
    application = topology.named(lag.application)
    # A trainer ends with its run, and the group of an environment may be of earlier tasks.
    needed = application.in_stack is InStack.ALWAYS and application.group_by is None
    records = None if state == REPLACED else lag.records
    return ApplicationStatus(lag.application, lag.group.name, state, len(lag.group.members), records, needed)
