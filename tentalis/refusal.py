"""What a broker's no means, in words: who may not do what, or why nobody gets in."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException

from tentalis.acls import CONSUMERS, FOLLOWERS, READERS, Operation, Resource, roles_with
from tentalis.config import Settings

DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Resource.TOPIC,
    KafkaError.GROUP_AUTHORIZATION_FAILED: Resource.GROUP,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Resource.TRANSACTIONAL_ID,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: Resource.CLUSTER,
}
# Errors of a connection that come again however often it is tried.
LASTING = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})


class Forbidden(Exception):
    """The broker's ACLs refuse this principal an operation. The message names both, the resource, and what to do."""


class Unreachable(Exception):
    """No broker lets this process in, or none answers. The message says why."""


def forbidden(
    settings: Settings, lacks: Sequence[tuple[Operation, Resource, str]], role: str | None = None
) -> Forbidden:
    """The error for operations that were refused, or will be; `role`: as which the process runs, if it is known."""
    principal = settings.security.principal
    may_not = "; ".join(f"{operation.value} on {resource.value} {name}" for operation, resource, name in lacks)
    if role is not None:
        does = f"`tentalis topics acls --role {role} --principal {_quoted(principal)}` prints what a {role} needs"
        return Forbidden(
            f"{principal} lacks ACLs that the role {role} needs: {may_not}. {does}, with --apply it grants it"
        )
    operation, resource, name = lacks[0]
    roles = roles_with(resource, name, operation)
    whose = f"the roles that may are {', '.join(roles)}" if roles else "none of the roles may"
    return Forbidden(
        f"the broker's ACLs do not allow {principal} the operation {may_not}; {whose} (`tentalis topics acls`). Run it "
        "as the user of such a role, or have an administrator grant it"
    )


def _quoted(principal: str) -> str:
    return f"'{principal}'" if " " in principal else principal


def refused(settings: Settings, error: KafkaError, operation: Operation, topic: str, group: str = "") -> Exception:
    """The exception for librdkafka's error on an operation: Forbidden, Unreachable, or KafkaException for all others.

    `group`: of the consumer, or the transactional id of the producer.
    """
    resource = DENIED.get(error.code())
    if resource is Resource.TOPIC:
        return forbidden(settings, [(operation, resource, topic)])
    if resource is Resource.GROUP:
        # Readers that are no members ask for the coordinator of a group all the same.
        needed = Operation.DESCRIBE if group in (READERS, FOLLOWERS, CONSUMERS) else Operation.READ
        return forbidden(settings, [(needed, resource, group)])
    if resource is Resource.TRANSACTIONAL_ID:
        return forbidden(settings, [(Operation.WRITE, resource, group)])
    if resource is Resource.CLUSTER:
        # Kafka's answer to an idempotent producer whose user may write to no topic at all.
        return forbidden(settings, [(operation, Resource.TOPIC, topic)])
    if error.code() in LASTING:
        return Unreachable(unreachable(settings, error.str()))
    other: Exception = KafkaException(error)
    return other


def unreachable(settings: Settings, said: str, within: float | None = None) -> str:
    """Why no broker could be used, from librdkafka's last words, and what to do about it."""
    security, at, text = settings.security, settings.bootstrap, said.lower()
    if "authentication fail" in text or "mechanism" in text:
        return (
            f"Kafka on {at} refuses the login of {security.principal} by {security.sasl_mechanism} ({said}). Check "
            "TENTALIS_SASL_USERNAME, TENTALIS_SASL_PASSWORD or its file, and whether the user exists for this mechanism"
        )
    if wants_certificate(said):
        return (
            f"Kafka on {at} wants a client certificate that it trusts ({said}). Set TENTALIS_SSL_CERTIFICATE and "
            "TENTALIS_SSL_KEY, signed by an authority that the broker trusts"
        )
    if security.tls and "ssl" in text:
        return (
            f"the TLS connection to Kafka on {at} fails ({said}). Check TENTALIS_SSL_CA, and that this port speaks TLS"
        )
    waited = "" if within is None else f" within {within:g} s"
    return (
        f"no Kafka answers on {at}{waited}{f' ({said})' if said else ''}. Start the local stack with `tentalis up`, or "
        "name your brokers with --bootstrap-server"
    )


def wants_certificate(said: str) -> bool:
    """Whether librdkafka's words are those of a broker that does not take the client's certificate, or misses one."""
    return "alert" in said.lower() and "certificate" in said.lower()
