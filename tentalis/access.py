"""Before a process starts: does a broker let it in, and may it do what its role does?"""

from __future__ import annotations

import logging
import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient

from tentalis.acls import ROLES, Operation, Resource
from tentalis.config import Settings
from tentalis.kafka import client_config
from tentalis.refusal import LASTING, Unreachable, forbidden, unreachable

# A listener that wants another protocol hangs up at once, and so does, now and then, a broker that stops.
HANG_UPS = 3
PATIENCE_S = 20.0


def _client(settings: Settings, reasons: list[KafkaError]) -> AdminClient:
    quiet = logging.Logger("tentalis.access.client")  # of no hierarchy: what it would log, the errors below say once
    quiet.addHandler(logging.NullHandler())
    return AdminClient(client_config(settings) | {"error_cb": reasons.append}, logger=quiet)


def connect(settings: Settings, timeout: float = PATIENCE_S) -> AdminClient:
    """A client to which a broker has answered within `timeout` seconds.

    Raises Unreachable: at once for what trying again cannot mend (a wrong password, a certificate that is not trusted,
    a listener of another protocol).
    """
    reasons: list[KafkaError] = []
    client = _client(settings, reasons)
    deadline = time.monotonic() + timeout
    while True:
        try:
            client.list_topics(timeout=max(0.05, min(0.3, deadline - time.monotonic())))
            return client
        except KafkaException as error:
            client.poll(0.0)
            # That all brokers are down says nothing of why.
            said = [reason for reason in reasons if reason.code() != KafkaError._ALL_BROKERS_DOWN]
            lasting = [reason for reason in said if reason.code() in LASTING]
            hung_up = [reason for reason in said if "security.protocol" in reason.str()]
            if lasting or len(hung_up) >= HANG_UPS:
                raise Unreachable(unreachable(settings, [(lasting or hung_up)[-1].str()])) from error
            if time.monotonic() > deadline:
                last = said[-1].str() if said else error.args[0].str()
                raise Unreachable(unreachable(settings, [last], timeout)) from error


def check_role(client: AdminClient, settings: Settings, role: str, timeout: float = PATIENCE_S) -> None:
    """Asks the broker what this principal may do with the topics of its role, and whether that is enough.

    Topics that do not exist are passed over (who needs them says so), and so is a broker that does not tell. Groups and
    transactions show when they are used.

    Raises Forbidden, naming every operation that is missing; KafkaException.
    """
    wanted: dict[str, list[Operation]] = {}
    for grant in ROLES[role].grants:
        if grant.resource is Resource.TOPIC and not grant.prefixed:
            wanted.setdefault(grant.name, []).append(grant.operation)
    described = client.describe_topics(
        TopicCollection(list(wanted)), include_authorized_operations=True, request_timeout=timeout
    )
    lacks: list[tuple[Operation, Resource, str]] = []
    for name, future in described.items():
        try:
            allowed = future.result(timeout).authorized_operations
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                lacks += [(operation, Resource.TOPIC, name) for operation in wanted[name]]
            elif error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            continue
        if allowed is not None:
            lacks += [(operation, Resource.TOPIC, name) for operation in wanted[name] if _code(operation) not in allowed]
    if lacks:
        raise forbidden(settings, lacks, role)


def _code(operation: Operation) -> Any:
    return AclOperation[operation.name]
