"""Before a process starts: does a broker let it in, and may it do what its role does?"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient

from tentalis.acls import ROLES, Operation, Resource
from tentalis.config import Settings
from tentalis.kafka import client_config
from tentalis.refusal import LASTING, Unreachable, forbidden, unreachable, wants_certificate

PATIENCE_S = 20.0
DIAGNOSE_AFTER_S = 2.0
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def connect(settings: Settings, timeout: float = PATIENCE_S) -> AdminClient:
    """A client to which a broker has answered within `timeout` seconds.

    Raises Unreachable: within seconds for what trying again cannot mend (a wrong password, a certificate that is not
    trusted, a port that speaks another protocol).
    """
    reasons: list[KafkaError] = []
    quiet = logging.Logger("tentalis.access.client")  # of no hierarchy: what it would log, the errors below say once
    quiet.addHandler(logging.NullHandler())
    client = AdminClient(client_config(settings) | {"error_cb": reasons.append}, logger=quiet)
    began, diagnosed = time.monotonic(), False
    while True:
        try:
            client.list_topics(timeout=max(0.05, min(0.3, began + timeout - time.monotonic())))
            return client
        except KafkaException as error:
            client.poll(0.0)
            # That all brokers are down says nothing of why.
            said = [r for r in reasons if r.code() not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)]
            lasting = next((r for r in reversed(said) if r.code() in LASTING or wants_certificate(r.str())), None)
            over = time.monotonic() > began + timeout
            if lasting is not None or over or (time.monotonic() > began + DIAGNOSE_AFTER_S and not diagnosed):
                diagnosed = True
                if found := None if lasting is not None and lasting.code() != KafkaError._SSL else diagnosis(settings):
                    raise Unreachable(found) from error
            if lasting is not None:
                raise Unreachable(unreachable(settings, lasting.str())) from error
            if over:
                last = said[-1].str() if said else error.args[0].str()
                raise Unreachable(unreachable(settings, last, timeout)) from error


def diagnosis(settings: Settings) -> str | None:
    """What is wrong with TLS between here and the first of the brokers, in words: librdkafka says of an untrusted
    certificate neither why, nor of a hang-up that the port wanted TLS. None: nothing, or nobody is there.
    """
    security = settings.security
    host, _, port = settings.require_bootstrap().split(",")[0].rpartition(":")
    host, at = host.strip("[]"), f"Kafka on {host}:{port}"
    if security.tls:
        context = security.ssl_context()
    else:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, int(port)), 3.0) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host):
                    speaks_tls = True
            except ssl.SSLCertVerificationError as error:
                return _untrusted(settings, at, error)
            except OSError:
                speaks_tls = False
    except (OSError, ValueError):
        return None
    protocol = f"TENTALIS_SECURITY_PROTOCOL={security.protocol}"
    if speaks_tls and not security.tls:
        return f"{at} speaks TLS on this port, but {protocol} does not: set it to SSL, or SASL_SSL with a login"
    if security.tls and not speaks_tls:
        return f"{at} does not speak TLS on this port, as {protocol} does. Name its TLS port, or set another protocol"
    if speaks_tls and not security.sasl:
        return (
            f"{at} takes the TLS connection and then hangs up on {protocol}: it may want a login (SASL_SSL with "
            "TENTALIS_SASL_MECHANISM, _USERNAME, _PASSWORD_FILE), or be no Kafka"
        )
    return None


def _untrusted(settings: Settings, at: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"the certificate of {at} is for another host ({error.verify_message}). Name the brokers as their "
            "certificate does; TENTALIS_SSL_VERIFY_HOSTNAME=false would take any host that has a certificate of the "
            "authority"
        )
    ca = settings.security.ssl_ca
    whom = f"TENTALIS_SSL_CA={ca}" if ca else "the system's authorities (TENTALIS_SSL_CA is not set)"
    return (
        f"the certificate of {at} is not trusted by {whom}: {error.verify_message}. Set TENTALIS_SSL_CA to the PEM "
        "file of the authority that signed it"
    )


def check_role(client: AdminClient, settings: Settings, role: str) -> None:
    """Whether this principal may do with the topics of its role what the role needs. Raises as `check`.

    Groups and transactions show when they are used.
    """
    wanted: dict[str, list[Operation]] = {}
    for grant in ROLES[role].grants:
        if grant.resource is Resource.TOPIC and not grant.prefixed:
            wanted.setdefault(grant.name, []).append(grant.operation)
    check(client, settings, wanted, role)


def check(
    client: AdminClient, settings: Settings, wanted: Mapping[str, Sequence[Operation]], role: str | None = None
) -> None:
    """Asks the broker what this principal may do with topics: name to operations.

    Topics that do not exist are passed over (who needs them says so), and so is a broker that does not tell.

    Raises Forbidden, naming every operation that is missing; KafkaException.
    """
    described = client.describe_topics(
        TopicCollection(list(wanted)), include_authorized_operations=True, request_timeout=PATIENCE_S
    )
    lacks: list[tuple[Operation, Resource, str]] = []
    for name, future in described.items():
        try:
            allowed = future.result(PATIENCE_S).authorized_operations
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                lacks += [(operation, Resource.TOPIC, name) for operation in wanted[name]]
            elif error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            continue
        if allowed is not None:
            lacks += [
                (operation, Resource.TOPIC, name) for operation in wanted[name] if _code(operation) not in allowed
            ]
    if lacks:
        raise forbidden(settings, lacks, role)


def _code(operation: Operation) -> Any:
    return AclOperation[operation.name]
