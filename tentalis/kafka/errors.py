"""Explains a broker's refusals: the ACLs that a principal lacks, or the reason why no connection is possible."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message

from tentalis.kafka.acls import CONSUMERS, FOLLOWERS, READERS, Operation, Resource, roles_with
from tentalis.service.settings import Settings

DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Resource.TOPIC,
    KafkaError.GROUP_AUTHORIZATION_FAILED: Resource.GROUP,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Resource.TRANSACTIONAL_ID,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: Resource.CLUSTER,
}
# Connection errors that retrying cannot fix.
LASTING = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})


class Forbidden(Exception):
    """The broker's ACLs deny this principal an operation. The message names both, the resource, and the remedy."""


class Unreachable(Exception):
    """No broker accepts this process, or none answers. The message gives the reason."""


def forbidden(
    settings: Settings, lacks: Sequence[tuple[Operation, Resource, str]], role: str | None = None
) -> Forbidden:
    """The error for operations that were or will be denied; `role` is the role of the process, if it is known."""
    principal = settings.security.principal
    may_not = "; ".join(f"{operation.value} on {resource.value} {name}" for operation, resource, name in lacks)
    if role is not None:
        does = f"`tentalis topics acls --role {role} --principal {_quoted(principal)}` prints the ACLs of {role}"
        return Forbidden(
            f"{principal} lacks ACLs that the role {role} needs: {may_not}. {does}; with --apply it grants them"
        )
    operation, resource, name = lacks[0]
    roles = roles_with(resource, name, operation)
    whose = f"the roles with this ACL are {', '.join(roles)}" if roles else "no role has this ACL"
    return Forbidden(
        f"the broker's ACLs do not allow {principal} the operation {may_not}; {whose} (`tentalis topics acls`). Run "
        "this as the user of such a role, or have an administrator grant the ACL"
    )


def _quoted(principal: str) -> str:
    return f"'{principal}'" if " " in principal else principal


def refused(settings: Settings, error: KafkaError, operation: Operation, topic: str, group: str = "") -> Exception:
    """The exception for librdkafka's error on an operation: Forbidden, Unreachable, or KafkaException for all others.

    `group`: the consumer group, or the transactional id of the producer.
    """
    resource = DENIED.get(error.code())
    if resource is Resource.TOPIC:
        return forbidden(settings, [(operation, resource, topic)])
    if resource is Resource.GROUP:
        # Readers that join no group still look up its coordinator.
        needed = Operation.DESCRIBE if group in (READERS, FOLLOWERS, CONSUMERS) else Operation.READ
        return forbidden(settings, [(needed, resource, group)])
    if resource is Resource.TRANSACTIONAL_ID:
        return forbidden(settings, [(Operation.WRITE, resource, group)])
    if resource is Resource.CLUSTER:
        # Kafka's response to an idempotent producer whose user may not write to any topic.
        return forbidden(settings, [(operation, Resource.TOPIC, topic)])
    if error.code() in LASTING:
        return Unreachable(unreachable(settings, error.str()))
    other: Exception = KafkaException(error)
    return other


def unreachable(settings: Settings, said: str, within: float | None = None) -> str:
    """Explains why no broker can be used, from librdkafka's last error text, and what to do about it."""
    security, at, text = settings.security, settings.bootstrap, said.lower()
    if "authentication fail" in text or "mechanism" in text:
        return (
            f"Kafka on {at} refuses the login of {security.principal} by {security.sasl_mechanism} ({said}). Check "
            "TENTALIS_SASL_USERNAME, TENTALIS_SASL_PASSWORD or its file, and whether the user exists for this mechanism"
        )
    if wants_certificate(said):
        return (
            f"Kafka on {at} requires a client certificate that it trusts ({said}). Set TENTALIS_SSL_CERTIFICATE and "
            "TENTALIS_SSL_KEY, signed by an authority that the broker trusts"
        )
    if security.tls and "ssl" in text:
        return (
            f"the TLS connection to Kafka on {at} fails ({said}). Check TENTALIS_SSL_CA, and that this port speaks TLS"
        )
    waited = "" if within is None else f" within {within:g} s"
    return (
        f"no Kafka answers on {at}{waited}{f' ({said})' if said else ''}. Start the local stack with `tentalis up`, or "
        "name your brokers with --bootstrap-server or TENTALIS_BOOTSTRAP"
    )


def wants_certificate(said: str) -> bool:
    """True if librdkafka's error text means that the broker rejects the client's certificate, or requires one."""
    return "alert" in said.lower() and "certificate" in said.lower()


# Answers of a broker that has just started or just became a leader, and of a client that asked it for its metadata.
ELECTING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        # The client's metadata and the broker disagree about the leader's epoch; librdkafka names neither retriable.
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._NOENT,  # no leaders found
    }
)
TRANSIENT = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE})


class RecordTooLarge(ValueError):
    """A record over the size limit, rejected by its producer."""


class DeliveryFailed(Exception):
    """The broker did not confirm a record."""


class NoSuchTopic(Exception):
    """The broker does not have a topic."""


def unconfirmed(error: KafkaError | None, message: Message) -> KafkaError | None:
    """The reason why the record of a delivery report is not on the log, None if the broker returned its offset.

    Without an offset librdkafka only infers that the record was written, because a later one was. But for a producer
    that it does not know yet, a broker also writes the second request after it rejected the first (KAFKA-15591)."""
    if error is None and message.offset() is None:
        return KafkaError(KafkaError._INCONSISTENT, "the broker confirmed a later record, but not this one")
    return error


def passes(error: KafkaError) -> bool:
    """True if a consumer's error is transient: librdkafka reports an unreachable broker as an event and reconnects, and
    a member that was away for too long rejoins its group."""
    return bool(error.retriable()) or error.code() in TRANSIENT | {KafkaError._MAX_POLL_EXCEEDED}
