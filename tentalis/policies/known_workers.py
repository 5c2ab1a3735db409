"""The workers and environments that a broker knows, by their consumer groups."""

from confluent_kafka.admin import AdminClient

from schemas.records import AssignmentScope
from tentalis.kafka import topology
from tentalis.kafka.config import client_config
from tentalis.kafka.groups import group_names
from tentalis.service.settings import Settings


def unknown_subject(settings: Settings, scope: AssignmentScope, subject: str) -> str | None:
    """The reason why an assignment may reach no worker; None if a worker or environment of this name has been there.

    Raises KafkaException.
    """
    worker = topology.named("worker")
    names = group_names(AdminClient(client_config(settings)))
    groups = {name for name in names if worker.has_group(name)}
    if scope is AssignmentScope.WORKER:
        # A worker's own group is its environment's, with its id behind it.
        if any(f"{group}-{subject}" in groups for group in groups):
            return None
        return (
            f"no worker {subject!r} has joined a consumer group yet: the assignment takes effect when `tentalis worker "
            f"--worker-id {subject}` runs, or when a gateway's caller sends this id in X-Worker-Id"
        )
    if scope is AssignmentScope.ENVIRONMENT and worker.consumer_group(environment=subject) not in groups:
        return (
            f"no worker of the environment {subject!r} has run yet: the assignment takes effect when `tentalis worker "
            f"--environment {subject}` runs"
        )
    return None
